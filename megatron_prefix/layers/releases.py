"""Differences between Megatron's releases in layers.  Pure."""

from __future__ import annotations

import itertools
from typing import Any

from packaging.version import Version


def is_since(release: str) -> bool:
    """Whether Megatron-Core is of a release or a later one; candidates for one count as it."""
    import megatron.core

    return Version(Version(megatron.core.__version__).base_version) >= Version(release)


def transformer_layers(model: Any) -> list[Any]:
    """Megatron's layers of a language model, in the order in which they run: the decoder's, and
    behind them those inside multi-token prediction, on the stage that has it; a layer that runs
    several times is there as often."""
    behind = getattr(model, "mtp", None)
    blocks = [*getattr(behind, "layers", ())]
    if getattr(behind, "mtp_use_repeated_layer", False):
        blocks *= model.config.mtp_num_layers or 1
    # 0.17 has renamed it; in a hybrid model it is a stack.
    inside = (
        getattr(block, "transformer_layer", None) or block.mtp_model_layer for block in blocks
    )
    stacks = (getattr(layer, "layers", (layer,)) for layer in inside)
    return [*model.decoder.layers, *itertools.chain(*stacks)]
