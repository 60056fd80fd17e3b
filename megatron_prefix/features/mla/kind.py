"""Multi-latent attention: a span leaves latents, from which its children compute K and V.  Pure.

Of a position it leaves the latent and the rotated part of the key, `kv_lora_rank` and
`qk_pos_emb_head_dim` numbers that all heads share: DeepSeek-V3's are 1.1 KiB a layer in bf16, its K
and V 80 KiB. A segment expands what it sees of its ancestors by the layer's own projection
(features/mla/latent.py). With DeepSeek-V3's widths an ancestor's position so costs a segment as
much as 410 pairs more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.layers.attention import ROTARY, Attention, InSegments, window_of
from megatron_prefix.layers.kind import Heads, Override, Running, owner
from megatron_prefix.plan.layer_numbers import LayerWork, Payload, Sharding
from megatron_prefix.refusals.table import (
    MLA_CACHE,
    MLA_FUSED_ROPE_CP,
    MLA_WINDOW,
    MLA_WITHOUT_SP,
    OTHER_ROTARY,
)
from megatron_prefix.tree.payload_map import Form


class MLA(Attention):
    """Megatron's MLASelfAttention, causal."""

    name = "multi-latent attention"
    forwards = frozenset({"megatron.core.transformer.multi_latent_attention.MultiLatentAttention"})

    def fills(self, config: Any, layer: int) -> bool:
        return bool(getattr(config, "multi_latent_attention", False))

    def heads(self, config: Any) -> Heads | None:
        """See Kind; every head has keys and values of its own."""
        if not self.fills(config, 0):
            return None
        num = config.num_attention_heads // getattr(config, "tensor_model_parallel_size", 1)
        width, value_width = latent_widths(config)
        return Heads(num, 1, width, value_width)

    def parameters(self, config: Any) -> int:
        hidden, heads, lora = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        width, value_width = latent_widths(config)
        queries = lora * (hidden + heads * width) if lora else hidden * heads * width
        latents = hidden * (config.kv_lora_rank + config.qk_pos_emb_head_dim)
        weights: int = queries + latents + _expansion(config) + heads * value_width * hidden
        return weights

    def work(self, config: Any) -> LayerWork:
        """See Kind; every context-parallel rank expands what its queries see, so all of it."""
        pairs = config.num_attention_heads * sum(latent_widths(config))
        ranks = getattr(config, "context_parallel_size", 1)
        return LayerWork(self.parameters(config), pairs, ranks * _expansion(config))

    def payload(self, config: Any, sharding: Sharding) -> Payload:
        """See Kind: latents, and the rotated part of all heads' keys, whole on every rank."""
        row = config.kv_lora_rank + config.qk_pos_emb_head_dim
        return Payload.of(Form.POSITIONS, row, sharding.itemsize)

    def module_of(self, layer: Any) -> Any | None:
        module = super().module_of(layer)
        return module if hasattr(module, "linear_kv_up_proj") else None

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        yield from super().refusals(number, module, model)
        rotary = getattr(module, "rotary_pos_emb", None)
        if rotary is None:  # mcore-bridge (ms-swift) takes it out, and writes the module's forward
            yield OTHER_ROTARY.given("of the model, which its latents have not of their own")
        elif not {owner(rotary, name) for name in ("forward", "get_emb")} <= ROTARY:
            yield OTHER_ROTARY.given(type(rotary).__name__)

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        yield from super().option_refusals(module, config)
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            yield MLA_WITHOUT_SP.given()
        if config.apply_rope_fusion and config.context_parallel_size > 1:
            yield MLA_FUSED_ROPE_CP.given()
        if window_of(module) is not None:
            yield MLA_WINDOW.given()
        if getattr(config, "cache_mla_latents", False):
            yield MLA_CACHE.given()

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        from megatron_prefix.features.mla.latent import Latents

        latents = Latents(module, number, running)
        core = InSegments(module, number, running, latents).forward
        return [(module.core_attention, "forward", core), *latents.overrides()]


def latent_widths(config: Any) -> tuple[int, int]:
    """Of a query and a key, and of a value, in one head."""
    return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim


def _expansion(config: Any) -> int:
    heads: int = config.num_attention_heads
    size: int = config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim)
    return size
