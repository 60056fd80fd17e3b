"""What CUDA graphs run of every kind of layer.  Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from megatron_prefix.features.experts.kind import Experts
from megatron_prefix.features.mla.kind import MLA
from megatron_prefix.features.recurrent.gdn import GatedDeltaNet
from megatron_prefix.features.recurrent.kind import Recurrent
from megatron_prefix.features.recurrent.mamba import Mamba2
from megatron_prefix.features.windows.kind import Window
from megatron_prefix.layers import fused_yarn
from megatron_prefix.layers.attention import QUANTISERS, Attention
from megatron_prefix.layers.kind import Kind, Part
from megatron_prefix.layers.mlp import MLP
from megatron_prefix.tree.payload_map import Form

FLA = "fla.ops."
"""Modules of flash-linear-attention's rules."""


class Graphed(Enum):
    """What graphs run of a kind's part of a layer."""

    NOTHING = "nothing"
    """Nor of what else is in its layer."""
    IN_FRONT = "in front"
    """What its layer runs in front of it; it runs as without, as does what is behind it."""
    WHOLE = "whole"
    """All of it, but for its core (`Running.tap`)."""


GRAPHED: Mapping[type[Kind], Graphed] = {
    Attention: Graphed.WHOLE,
    Window: Graphed.WHOLE,
    MLA: Graphed.WHOLE,
    Mamba2: Graphed.WHOLE,
    GatedDeltaNet: Graphed.WHOLE,
    MLP: Graphed.WHOLE,
    Experts: Graphed.IN_FRONT,
}
"""Of others nothing: products that are not Megatron's do not add to main gradients."""


def graphed(kind: Kind, config: Any) -> Graphed:
    """What graphs run of a kind in a model with a config. They turn queries as when they were
    captured, and what context-parallel ranks exchange of a recurrent layer follows its spans."""
    if isinstance(kind, Attention) and fused_yarn.differs(config):
        return Graphed.NOTHING
    if isinstance(kind, Recurrent) and getattr(config, "context_parallel_size", 1) > 1:
        return Graphed.NOTHING
    return GRAPHED.get(type(kind), Graphed.NOTHING)


def without_graphs(config: Any, kinds: Iterable[Kind | None]) -> str:
    """What keeps graphs from a layer with these kinds; "" if nothing does."""
    names = (kind.name for kind in kinds if kind and graphed(kind, config) is Graphed.NOTHING)
    return " and ".join(names)


INSIDE: Mapping[type[Kind], Form] = {
    Attention: Form.POSITIONS,
    Window: Form.POSITIONS,
    MLA: Form.POSITIONS,
    GatedDeltaNet: Form.SPANS,
}
"""Kinds whose cores may be in graphs (placed.py), and what these leave."""


def inside_form(mixer: Part) -> Form | None:
    """What a mixer leaves, if its core may be in graphs: it has no quantisers, which a trainer may
    change between steps, or its rule runs over chunks that it is given."""
    form = INSIDE.get(type(mixer.kind)) if mixer.kind else None
    if form == Form.POSITIONS:
        return None if hasattr(mixer.module.core_attention, QUANTISERS[0]) else form
    return form if form and has_known_chunks(mixer.module) else None


def looks_back(mixer: Part) -> int:
    """Positions that the convolution of a GatedDeltaNet looks back."""
    width: int = mixer.module.conv1d.weight.shape[-1]
    return width - 1


def has_known_chunks(module: Any) -> bool:
    """Whether the rule that a GatedDeltaNet runs in segments may be in graphs: on the CPU any, else
    flash-linear-attention's. Its descriptors of memory (FLA_USE_TMA) were not tried without
    positions."""
    rule = getattr(getattr(module.forward, "__self__", None), "rule", None)
    is_fla = str(getattr(rule, "__module__", "")).startswith(FLA)
    is_plain = os.environ.get("FLA_USE_TMA", "0") != "1"
    return module.conv1d.weight.device.type == "cpu" or (is_fla and is_plain)
