"""DeepSeek's sparse attention: an indexer chooses the keys of every query, up to `topk`.  Pure.

A layer of multi-latent attention, whose core attention has an indexer: small queries and one small
key a position, whose scores choose. A span leaves the latents of its positions, the rotated parts
of their keys, and their index keys (features/dsa/sparse.py). docs/families/sparse-attention.md says
what is exact about that, and what it costs. ("DeepSeek-V3.2: Pushing the Frontier of Open Large
Language Models", section 2.1.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.features import has_indexer_loss
from megatron_prefix.features.mla.kind import MLA
from megatron_prefix.layers.attention import ROTARY
from megatron_prefix.layers.kind import Override, Running, owner
from megatron_prefix.plan.layer_numbers import LayerWork, Payload, Sharding
from megatron_prefix.refusals.table import (
    DSA_CP,
    DSA_INDEX_SHARED,
    DSA_RECOMPUTED,
    OTHER_ROTARY,
)

_MODULE = "megatron.core.transformer.experimental_attention_variant.dsa"


class DSA(MLA):
    """Megatron's MLASelfAttention with DSAttention."""

    name = "DeepSeek's sparse attention"
    cores = frozenset({f"{_MODULE}.DSAttention"})

    def fills(self, config: Any, layer: int) -> bool:
        """See Kind."""
        return getattr(config, "experimental_attention_variant", None) == "dsa"

    def counts(self, config: Any) -> bool:
        """See Kind: the indexer's loss, if it has one."""
        return has_indexer_loss(config)

    def parameters(self, config: Any) -> int:
        """See Kind."""
        (heads, width), hidden = _indexer(config), config.hidden_size
        weights: int = (config.q_lora_rank or hidden) * heads * width + hidden * (width + heads)
        return super().parameters(config) + weights

    def work(self, config: Any) -> LayerWork:
        """See Kind. Megatron's own attention computes all pairs, and hides those not chosen; so
        does ours, and the indexer has as many."""
        full, (heads, width) = super().work(config), _indexer(config)
        return replace(full, pairs=full.pairs + heads * width)

    def payload(self, config: Any, sharding: Sharding) -> Payload:
        """See Kind: an index key besides."""
        latents, (_, width) = super().payload(config, sharding), _indexer(config)
        keys = Payload.of(latents.form, width, sharding.itemsize)
        return replace(
            latents, values=latents.values + keys.values,
            gradients=latents.gradients + keys.gradients,
        )  # fmt: skip

    def module_of(self, layer: Any) -> Any | None:
        """See Kind."""
        module = super().module_of(layer)
        return module if hasattr(getattr(module, "core_attention", None), "indexer") else None

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        """See Kind."""
        yield from super().refusals(number, module, model)
        rotary = getattr(module.core_attention.indexer, "rotary_pos_emb", None)
        if rotary is not None and not {owner(rotary, n) for n in ("forward", "get_emb")} <= ROTARY:
            yield OTHER_ROTARY.given(type(rotary).__name__)

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        """See Kind."""
        yield from super().option_refusals(module, config)
        if config.context_parallel_size > 1:
            yield DSA_CP.given()
        if (getattr(config, "dsa_indexer_topk_freq", None) or 1) > 1:
            yield DSA_INDEX_SHARED.given()
        if getattr(module, "checkpoint_core_attention", False):
            yield DSA_RECOMPUTED.given()

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        """See Kind."""
        from megatron_prefix.features.dsa.sparse import Sparse

        sparse = Sparse(module, number, running)
        core = module.core_attention
        return [(core, "forward", sparse.core(core.forward)), *sparse.overrides()]


def _indexer(config: Any) -> tuple[int, int]:
    """Heads of the indexer, and their width."""
    return config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
