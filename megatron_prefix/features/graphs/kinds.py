"""What CUDA graphs run of every kind of layer, and where that saves what it does.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from megatron_prefix.layers import fused_yarn
from megatron_prefix.layers.attention import Attention
from megatron_prefix.layers.experts import Experts
from megatron_prefix.layers.gdn import GatedDeltaNet
from megatron_prefix.layers.kind import Kind
from megatron_prefix.layers.mamba import Mamba2
from megatron_prefix.layers.mla import MLA
from megatron_prefix.layers.mlp import MLP
from megatron_prefix.layers.recurrent.kind import CHUNK, Recurrent
from megatron_prefix.layers.window import Window
from megatron_prefix.predict.execution import Execution
from megatron_prefix.predict.kinds import LayerMemory


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


class Elsewhere(NamedTuple):
    """Bytes a position on one rank.

    Attributes:
        apart: of what is saved for a wave, what is not where graphs write.
        twice: of that, what is there, too.
    """

    apart: float = 0.0
    twice: float = 0.0


def elsewhere(kind: Kind, config: Any, form: Execution, memory: LayerMemory) -> Elsewhere:
    """What a kind's core and experts save; arguments as of `Kind.memory`, and what that says."""
    size = form.itemsize
    if isinstance(kind, Experts):
        return Elsewhere(memory.wave)
    if isinstance(kind, Mamba2):  # the kernel's input, and the output projection's
        shape = kind.shape(config)
        return Elsewhere((shape.rows + shape.values) * size / form.tp)
    if isinstance(kind, GatedDeltaNet):  # A; what the convolution makes has a place of its own
        convolved = sum(kind.shape(config).convolved)
        numbers = config.linear_num_value_heads * CHUNK
        return Elsewhere(numbers * size / form.tp, convolved * size / form.tp)
    if isinstance(kind, MLA):
        return Elsewhere(config.num_attention_heads / form.tp * max(4, size))
    if isinstance(kind, Attention):  # values that norms hold are copied
        heads = config.num_attention_heads
        keys = max(1, (config.num_query_groups or heads) / form.tp) * config.kv_channels
        keeps_keys = bool(config.qk_layernorm) and not form.fused_layers
        return Elsewhere(heads / form.tp * max(4, size), keys * size if keeps_keys else 0.0)
    return Elsewhere()
