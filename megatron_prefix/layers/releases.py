"""Differences between Megatron's releases in layers.  Pure."""

from __future__ import annotations

from typing import Any

from packaging.version import Version


def is_since(release: str) -> bool:
    """Whether Megatron-Core is of a release or a later one; candidates for one count as it."""
    import megatron.core

    return Version(Version(megatron.core.__version__).base_version) >= Version(release)


def transformer_layers(model: Any) -> list[Any]:
    """Megatron's layers of a language model, in the order in which they run: the decoder's, and
    behind them those inside multi-token prediction, on the stage that has it."""
    blocks = getattr(getattr(model, "mtp", None), "layers", ())
    # 0.17 has renamed it.
    inside = (
        getattr(block, "transformer_layer", None) or block.mtp_model_layer for block in blocks
    )
    return [*model.decoder.layers, *inside]
