"""What a step computes with and without sharing, counted.  Pure.

Costs are FLOPs of matrix products: a linear part a position, the output layer a scored position,
attention a visible (query, key) pair, and for kernel launches an overhead an action, expressed in
positions. A backward costs two forwards, so only forwards are counted. ("Schedule-Level
Shared-Prefix Reuse for LLM RL Training", section 3.2; "AReaL-DTA", section 4, balances the same
quantity.) plan/times.py makes seconds of the same counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_prefix.plan.layer_mix import LayerMix, layers_with_experts, pattern_of
from megatron_prefix.tree import Forest, Segment


class Work(NamedTuple):
    """What one or more actions compute, in all layers.

    Attributes:
        positions: computed, padding included.
        scored: positions that go through the output layer: those with loss.
        pairs: visible (query, key) pairs.
        actions: microbatches, or segments.
        calls: attention calls of a layer.
    """

    positions: float = 0.0
    scored: float = 0.0
    pairs: float = 0.0
    actions: float = 0.0
    calls: float = 0.0


def segment_work(segment: Segment) -> Work:
    """The forward of one segment."""
    positions = segment.padded_length
    pairs = sum(causal_pairs(span.start, span.padded) for span in segment.spans)
    return Work(positions, segment.num_read, pairs, 1, num_attention_calls(segment))


def num_attention_calls(segment: Segment) -> int:
    """Attention calls of a layer: one for the spans' own keys, one for those of their ancestors."""
    return 1 + any(span.start > 0 for span in segment.spans)


def stock_work(forest: Forest, microbatch_of: Sequence[int] | None = None) -> Work:
    """The forwards of the stock schedule; all positions of a microbatch go to the output layer.

    Args:
        forest: of the step; its segments are not looked at.
        microbatch_of: the trainer's microbatch of each sample (default: one sample each).
    """
    lengths = forest.num_positions
    num = len(lengths) if microbatch_of is None else len(set(microbatch_of))
    positions = sum(lengths)
    pairs = sum(causal_pairs(0, length) for length in lengths)
    return Work(positions, positions, pairs, num, num)


def causal_pairs(start: int, length: int) -> float:
    """Visible (query, key) pairs of `length` positions that begin at position `start`."""
    return length * (start + (length + 1) / 2)


@dataclass(frozen=True)
class CostModel:
    """Forward FLOPs of one model.

    Attributes:
        linear: FLOPs per position in all layers' matrix products.
        head: FLOPs per position in the output layer.
        attention: FLOPs per (query, key) pair in all layers.
        action_tokens: overhead of one action, in positions of linear work.
    """

    linear: float
    head: float
    attention: float
    action_tokens: float = 32.0

    @classmethod
    def of_shape(
        cls,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        ffn_hidden_size: float,
        vocab_size: int,
        gated: bool = True,
        mix: LayerMix | None = None,
    ) -> CostModel:
        """Counts the matrix products of a transformer.

        Args:
            ffn_hidden_size: width of the MLP that a token goes through, the mean of all MLPs.
            gated: whether the MLP has a gate.
            mix: its layers; None: all have attention and an MLP.
        """
        mix = mix or LayerMix("*" * num_layers, num_layers)
        queries = 3 if mix.output_gate else 2
        projections = hidden_size * head_dim * (queries * num_heads + 2 * num_kv_heads)
        mlp = hidden_size * ffn_hidden_size * (3 if gated else 2)
        scans = mix.recurrence(lambda layer: layer.products(hidden_size))
        products = mix.attention * projections + mix.mlps * mlp + scans
        return cls(
            linear=2.0 * products,
            head=2.0 * hidden_size * vocab_size,
            attention=4.0 * mix.attention * num_heads * head_dim,
        )

    @classmethod
    def of_config(
        cls, config: Any, vocab_size: int | None = None, pattern: str | None = None
    ) -> CostModel:
        """Counts for a Megatron TransformerConfig or a ModelSpec.

        Of the experts those count that a token visits, and shared ones.

        Args:
            config: the model's.
            vocab_size: of the output layer (default: the spec's; no TransformerConfig has one).
            pattern: see `LayerMix.of_config`.
        """
        heads = config.num_attention_heads
        if vocab_size is None:
            vocab_size = getattr(config, "vocab_size", None) or 0
        return cls.of_shape(
            config.num_layers, config.hidden_size, heads, config.num_query_groups or heads,
            config.kv_channels, _mean_width(config, pattern), vocab_size,
            config.gated_linear_unit, LayerMix.of_config(config, pattern),
        )  # fmt: skip

    def flops(self, work: Work) -> float:
        """Forward FLOPs of some work, overheads included."""
        return (
            self.linear * (work.positions + self.action_tokens * work.actions)
            + self.head * work.scored
            + self.attention * work.pairs
        )

    def stock(self, forest: Forest, microbatch_of: Sequence[int] | None = None) -> float:
        """Forward FLOPs of the stock schedule; see `stock_work`."""
        return self.flops(stock_work(forest, microbatch_of))

    def segment(self, segment: Segment) -> float:
        """Forward FLOPs of one segment."""
        return self.flops(segment_work(segment))

    def prefix(self, forest: Forest) -> float:
        """Forward FLOPs of the prefix schedule."""
        return sum(map(self.segment, forest.segments))

    def speedup(self, forest: Forest, microbatch_of: Sequence[int] | None = None) -> float:
        """FLOPs of the stock schedule over those of the prefix schedule."""
        if not forest.segments:
            return 1.0
        return self.stock(forest, microbatch_of) / self.prefix(forest)


def _mean_width(config: Any, pattern: str | None) -> float:
    """Width of the MLP that a token goes through, on average over the MLPs."""
    dense = config.ffn_hidden_size
    if not getattr(config, "num_moe_experts", None):
        return dense
    expert = getattr(config, "moe_ffn_hidden_size", None) or dense
    shared = getattr(config, "moe_shared_expert_intermediate_size", None) or 0
    routed = expert * config.moe_router_topk + shared
    sparse = layers_with_experts(config, pattern)
    if pattern := pattern_of(config) if pattern is None else pattern:
        has_mlp = [symbol in "-E" for symbol in pattern]
        sparse = list(itertools.compress(sparse, has_mlp)) or [False]
    return sum(routed if one else dense for one in sparse) / len(sparse)
