"""Self-attention: a span leaves K and V of its positions, its children send back gK and gV.

Segments compute attention themselves (blocks/core.py), by the rule of Megatron's own modules.
Another module instead (a window of its own, capped scores) would be left out without a word, so it
is refused. A module is told by the class that defines its method: a subclass may change everything
else. Importing the classes would need transformer-engine.  Pure, until it is hooked.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from megatron_prefix.errors import Reason
from megatron_prefix.layers import fused_yarn
from megatron_prefix.layers.kind import Heads, Kind, Override, Running, Slot, owner
from megatron_prefix.plan.layer_numbers import LayerWork, Payload, Sharding
from megatron_prefix.refusals.table import (
    FUSED_YARN,
    LEARNED_SINKS_CP,
    MASK_TYPE,
    NO_SINKS,
    OTHER_CORE,
    OWN_FORWARD,
    SINKS_CP,
)
from megatron_prefix.tree.payload_map import Form

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_prefix.layers.blocks.shared import Shared

QUANTISERS = ("q_bmm_quantizer", "k_bmm_quantizer", "v_bmm_quantizer")
_QUANTISED = "modelopt.torch.quantization.plugins.megatron._QuantTEDotProductAttention"
CORES = {
    "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "megatron.core.extensions.transformer_engine.TEDotProductAttention",
    _QUANTISED,
}
"""Classes of core attention whose rule segments follow; another one adds its name."""
_QWEN3 = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention.Qwen3VLSelfAttention"
MEGATRON = "megatron.core.transformer.attention.Attention"
FORWARDS = frozenset({
    MEGATRON, _QWEN3, "mbridge.models.qwen2_5_vl.attention.Qwen2_5VLSelfAttention",
    "mbridge.models.qwen3_vl.attention.Qwen3VLSelfAttention",
    "mbridge.models.qwen3_5.attention.Qwen3_5VLSelfAttention",
})  # fmt: skip
"""Classes of attention whose forward hands queries, keys and values, turned by the rotary table row
by row, to its core attention; another one adds its name."""
PASSED_OVER = {_QWEN3: "megatron.core.transformer.dot_product_attention.DotProductAttention"}
"""Core attention, or a base of it, in whose place such a forward does something of its own."""
IGNORES_MASKS = {"megatron.core.extensions.transformer_engine.TEDotProductAttention", _QUANTISED}
"""Of these, those that are causal whatever mask a call has if their attn_mask_type is `causal`;
another one adds its name. Megatron's own puts a given mask in the causal one's place."""
_ROTARY = "megatron.core.models.common.embeddings"
ROTARY = {
    f"{_ROTARY}.rotary_pos_embedding.RotaryEmbedding",
    f"{_ROTARY}.yarn_rotary_pos_embedding.YarnRotaryEmbedding",
}
"""Classes of rotary embeddings whose rule segments follow."""
_CAUSAL = ("causal", "padding_causal", "arbitrary")
"""Names of Megatron's AttnMaskType. With `arbitrary` (ModelOpt's layers) a call's mask decides: see
`mask_use`."""


class Attention(Kind):
    """Megatron's SelfAttention, causal."""

    name, symbol, slot, form = "attention", "*", Slot.MIXER, Form.POSITIONS
    forwards: frozenset[str] = FORWARDS
    """Classes whose forward its modules have."""
    cores: Collection[str] = CORES
    """Classes whose forward its core attention has."""

    def fills(self, config: Any, layer: int) -> bool:
        return True

    def work(self, config: Any) -> LayerWork:
        return LayerWork(
            self.parameters(config), 2 * config.num_attention_heads * config.kv_channels
        )

    def parameters(self, config: Any) -> int:
        heads = config.num_attention_heads
        queries = (2 if is_gated(config) else 1) * heads
        rows = queries + heads + 2 * (config.num_query_groups or heads)
        weights: int = config.hidden_size * config.kv_channels * rows
        return weights

    def payload(self, config: Any, sharding: Sharding) -> Payload:
        groups = config.num_query_groups or config.num_attention_heads
        keys = max(1, groups / sharding.tp) * config.kv_channels
        return Payload.of(Form.POSITIONS, 2 * keys, sharding.itemsize)

    def heads(self, config: Any) -> Heads | None:
        """See Kind; of K/V heads a rank of tensor parallelism has at least one."""
        ranks = getattr(config, "tensor_model_parallel_size", 1)
        num = config.num_attention_heads // ranks
        shared = max((config.num_query_groups or config.num_attention_heads) // ranks, 1)
        return Heads(num, max(num // shared, 1), config.kv_channels, config.kv_channels)

    def module_of(self, layer: Any) -> Any | None:
        module = getattr(layer, "self_attention", None)
        return module if hasattr(module, "core_attention") and not hasattr(layer, "mixer") else None

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        core = module.core_attention
        forward = owner(module, "forward")
        if forward not in self.forwards:
            yield OWN_FORWARD.given(number, type(module).__name__)
            return
        bases = {f"{base.__module__}.{base.__qualname__}" for base in type(core).__mro__}
        if owner(core, "forward") not in self.cores or PASSED_OVER.get(forward) in bases:
            yield OTHER_CORE.given(number, type(core).__name__)
            return
        for part in (module, core):
            mask = _mask_type(part)
            if mask and mask not in _CAUSAL:
                yield MASK_TYPE.given(number, mask)
                return

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        core = module.core_attention
        has_sinks = _has_sinks(core.config)
        if has_sinks and getattr(core, "softmax_offset", None) is None:
            yield NO_SINKS.given(core.config.softmax_type)
        if has_sinks and config.context_parallel_size > 1:
            how = exchanged_by(module)
            if how not in (None, "a2a"):
                yield SINKS_CP.given(core.config.softmax_type, how)
            elif how and core.config.softmax_type == "learnable":
                yield LEARNED_SINKS_CP.given()
        if fused_yarn.differs(config) and not fused_yarn.is_known(module):
            yield FUSED_YARN.given(type(module).__name__)

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        from megatron_prefix.layers.blocks.shared import KEYS

        yield module.core_attention, "forward", InSegments(module, number, running, KEYS).forward
        yield from fused_yarn.overrides(module, running)


class MaskUse(IntEnum):
    """What attention does with a call's attention_mask; of several layers the largest counts."""

    IGNORED = 0
    """It is causal whatever the mask says."""
    OBEYED = 1
    """It is causal, unless there is a mask."""
    NEEDED = 2
    """Only a mask makes it causal."""


def mask_use(module: Any) -> MaskUse:
    """What a module does with a call's mask."""
    types = {_mask_type(part) for part in (module, module.core_attention)} - {""}
    if "arbitrary" in types:
        return MaskUse.NEEDED
    ignores = owner(module.core_attention, "forward") in IGNORES_MASKS and types <= {"causal"}
    return MaskUse.IGNORED if ignores else MaskUse.OBEYED


def _mask_type(module: Any) -> str:
    mask: Any = getattr(module, "attn_mask_type", None)
    return mask.name if type(mask).__name__ == "AttnMaskType" else ""


def window_of(attention: Any) -> tuple[int, int] | None:
    """Positions that a query of a module sees before its own and behind it; None: all before.

    transformer-engine's module has a window always; one that begins at -1 has no beginning.
    """
    core = attention.core_attention
    if (size := getattr(core, "window_size", None)) is not None:
        before, behind = size
        return None if before < 0 else (before, behind)
    size = getattr(getattr(core, "scale_mask_softmax", None), "window_size", None)
    return None if size is None else (size[0], size[1])


def exchanged_by(attention: Any) -> str | None:
    """How transformer-engine's core attention exchanges keys of context-parallel ranks; None:
    another one."""
    comm_type: str | None = getattr(attention.core_attention, "cp_comm_type", None)
    return comm_type


def is_gated(config: Any) -> bool:
    """Whether a gate multiplies the output of attention."""
    return bool(getattr(config, "attention_output_gate", False))


def _norms_hold_projection(config: Any) -> bool:
    """Whether norms of queries and keys keep views of what both were cut from, and so all of it:
    torch's do, transformer-engine's keep copies (`input_.contiguous()` in
    transformer_engine/pytorch/ops/basic/rmsnorm.py)."""
    fused = getattr(config, "transformer_impl", "transformer_engine") == "transformer_engine"
    return bool(config.qk_layernorm) and not fused


class InSegments:
    """A core attention in segments."""

    def __init__(self, attention: Any, number: int, running: Running, shared: Shared) -> None:
        from megatron_prefix.layers.blocks.core import segment_attention
        from megatron_prefix.layers.blocks.unread import keys_only

        self._attend, self._keys_only = segment_attention, keys_only
        self._attention, self._core = attention, attention.core_attention
        self._number, self._running, self._shared = number, running, shared
        self._stock = self._core.forward
        self._held = _norms_hold_projection(attention.config)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any,
        crossing: Sequence[Tensor] = (), into: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        context, shared = self._running.current, self._shared
        if (tap := self._running.tap) is not None:
            shape = len(query), 1, query.shape[2] * value.shape[3]
            return tap(self._again, [query, key, value], shape, shared.crossing())
        if context is None:
            output: Tensor = self._stock(query, key, value, *args, **kwargs)
            return output
        if crossing:
            value = shared.crossed(context, value, *crossing)
        query, key, value = quantised(self._core, query, key, value)
        number = self._number
        if number == context.keys_only:
            return self._keys_only(query, key, value, context, number, shared)
        if not (context.inner or self._held):
            # A wave saves its values; a view would keep the whole projection in memory.
            value = value.contiguous()
        scale = softmax_scale(self._attention)  # it may be changed between steps
        kernel = self._running.kernels[shared.window]
        sink = self._core.softmax_offset.flatten() if _has_sinks(self._core.config) else None
        return self._attend(query, key, value, context, number, scale, kernel, shared, sink, into)

    def _again(
        self, query: Tensor, key: Tensor, value: Tensor, *crossing: Tensor, into: Tensor
    ) -> Tensor:
        return self.forward(query, key, value, crossing=crossing, into=into)


def _has_sinks(config: Any) -> bool:
    """Whether a core attention has one more score of every head, its `softmax_offset`, [heads]."""
    return getattr(config, "softmax_type", "vanilla") != "vanilla"


def quantised(core: Any, *tensors: Any) -> tuple[Any, ...]:
    """Queries, keys and values as quantisers of ModelOpt leave them, where a core attention has
    some (features/qat)."""
    if not hasattr(core, QUANTISERS[0]):
        return tensors
    pairs = zip(QUANTISERS, tensors, strict=True)
    return tuple(getattr(core, name)(tensor) for name, tensor in pairs)


def softmax_scale(attention: Any) -> float:
    """The stock core attention's scale: its own, the layer's, the config's, or 1/sqrt(dim).

    With apply_query_key_layer_scaling Megatron's own core attention divides by the layer's number
    before the product and multiplies after it (megatron/core/transformer/dot_product_attention.py).
    """
    config, core = attention.config, attention.core_attention
    for holder in (core, attention, config):
        scale = getattr(holder, "softmax_scale", None)
        if isinstance(scale, int | float):
            softmax = getattr(core, "scale_mask_softmax", None)
            return scale * (getattr(softmax, "scale", None) or 1.0)
    return 1.0 / math.sqrt(config.kv_channels)
