"""Self-attention: a span leaves K and V of its positions, its children send back gK and gV.

Segments compute attention themselves (blocks/core.py), by the rule of Megatron's own modules.
Another module instead (a window of its own, capped scores) would be left out without a word, so it
is refused. A module is told by the class that defines its method: a subclass may change everything
else. Importing the classes would need transformer-engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_prefix.errors import Reason
from megatron_prefix.layers.blocks.core import segment_attention
from megatron_prefix.layers.blocks.unread import keys_only
from megatron_prefix.layers.kind import Kind, Override, Running, Slot, owner
from megatron_prefix.refusals.table import MASK_TYPE, OTHER_CORE, OWN_FORWARD
from megatron_prefix.tree.payload_map import Form

CORES = {
    "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "megatron.core.extensions.transformer_engine.TEDotProductAttention",
}
"""Classes of core attention whose rule segments follow; another one adds its name."""
_ATTENTION = {"megatron.core.transformer.attention.Attention"}
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.arbitrary)
"""With `arbitrary` (ModelOpt's layers) a call's mask decides: see `needs_masks`."""


class Attention(Kind):
    """Megatron's SelfAttention, causal."""

    name, symbol, slot, form = "attention", "*", Slot.MIXER, Form.POSITIONS

    def module_of(self, layer: Any) -> Any | None:
        """See Kind."""
        module = getattr(layer, "self_attention", None)
        return module if hasattr(module, "core_attention") and not hasattr(layer, "mixer") else None

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        """See Kind."""
        core = module.core_attention
        if owner(module, "forward") not in _ATTENTION:
            yield OWN_FORWARD.given(number, type(module).__name__)
            return
        if owner(core, "forward") not in CORES:
            yield OTHER_CORE.given(number, type(core).__name__)
            return
        for one in (module, core):
            mask = getattr(one, "attn_mask_type", AttnMaskType.causal)
            if isinstance(mask, AttnMaskType) and mask not in _CAUSAL:
                yield MASK_TYPE.given(number, mask.name)
                return

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        """See Kind."""
        yield module.core_attention, "forward", _in_segments(module, number, running)


def needs_masks(module: Any) -> bool:
    """Whether attention is causal only if its calls have a causal mask."""
    return any(
        getattr(one, "attn_mask_type", None) is AttnMaskType.arbitrary
        for one in (module, module.core_attention)
    )


def _in_segments(attention: Any, number: int, running: Running) -> Callable[..., Tensor]:
    """The core attention's forward."""
    core = attention.core_attention
    stock, scale = core.forward, _softmax_scale(attention, core)
    norms = attention.config.qk_layernorm

    def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        context = running.current
        if context is None:
            found: Tensor = stock(query, key, value, *args, **kwargs)
            return found
        if number == context.keys_only:
            return keys_only(query, key, value, context, number)
        if not (context.inner or norms):
            # A wave saves its values; a view would keep the whole projection in memory. With
            # norms of queries and keys the projection is kept anyway.
            value = value.contiguous()
        return segment_attention(query, key, value, context, number, scale, running.kernel)

    return forward


def _softmax_scale(attention: Any, core: Any) -> float:
    """The stock core attention's scale: its own, the layer's, the config's, or 1/sqrt(dim).

    With apply_query_key_layer_scaling Megatron's own core attention divides by the layer's number
    before the product and multiplies after it (megatron/core/transformer/dot_product_attention.py).
    """
    config = attention.config
    for one in (core, attention, config):
        scale = getattr(one, "softmax_scale", None)
        if isinstance(scale, int | float):
            softmax = getattr(core, "scale_mask_softmax", None)
            return scale * (getattr(softmax, "scale", None) or 1.0)
    return 1.0 / math.sqrt(config.kv_channels)
