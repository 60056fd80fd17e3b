"""What a step costs with and without sharing, and whether to share.  Pure.

Costs are FLOPs of matrix products: a linear part a position, the output layer a scored position,
attention a visible (query, key) pair, and for kernel launches an overhead an action, expressed in
positions. A backward costs two forwards, so only forwards are counted. ("Schedule-Level
Shared-Prefix Reuse for LLM RL Training", section 3.2; "AReaL-DTA", section 4, balances the same
quantity.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.models.presets import ModelSpec
from megatron_prefix.tree import Forest, Segment


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
        ffn_hidden_size: int,
        vocab_size: int,
        gated: bool = True,
    ) -> CostModel:
        """Counts the matrix products of a dense transformer."""
        projections = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
        mlp = hidden_size * ffn_hidden_size * (3 if gated else 2)
        return cls(
            linear=2.0 * num_layers * (projections + mlp),
            head=2.0 * hidden_size * vocab_size,
            attention=4.0 * num_layers * num_heads * head_dim,
        )

    @classmethod
    def of_spec(cls, spec: ModelSpec) -> CostModel:
        """Counts for a ModelSpec; of the experts only those that a token visits count."""
        widths = [
            (spec.moe_ffn_hidden_size or 0) * spec.moe_top_k
            if spec.is_moe and (spec.moe_layers is None or spec.moe_layers[layer])
            else spec.ffn_hidden_size
            for layer in range(spec.num_layers)
        ]
        return cls.of_shape(
            spec.num_layers, spec.hidden_size, spec.num_attention_heads, spec.num_query_groups,
            spec.kv_channels, round(sum(widths) / len(widths)), spec.vocab_size or 0,
        )  # fmt: skip

    @classmethod
    def of_config(cls, config: Any, vocab_size: int = 0) -> CostModel:
        """Counts for a Megatron TransformerConfig, which has no vocabulary size."""
        heads = config.num_attention_heads
        return cls.of_shape(
            config.num_layers, config.hidden_size, heads, config.num_query_groups or heads,
            config.kv_channels, config.ffn_hidden_size, vocab_size, config.gated_linear_unit,
        )  # fmt: skip

    def stock(self, forest: Forest) -> float:
        """Forward FLOPs of the stock schedule, one rollout a microbatch."""
        return sum(
            (self.linear + self.head) * n + self.attention * _causal(0, n) + self._overhead
            for n in forest.num_positions
        )

    def segment(self, segment: Segment) -> float:
        """Forward FLOPs of one segment."""
        positions = segment.padded_length
        pairs = sum(_causal(span.start, span.padded) for span in segment.spans)
        head = self.head if segment.scored else 0.0
        return (self.linear + head) * positions + self.attention * pairs + self._overhead

    def prefix(self, forest: Forest) -> float:
        """Forward FLOPs of the prefix schedule."""
        return sum(map(self.segment, forest.segments))

    def speedup(self, forest: Forest) -> float:
        """Predicted time of the stock schedule over that of the prefix schedule."""
        return self.stock(forest) / self.prefix(forest) if forest.segments else 1.0

    @property
    def _overhead(self) -> float:
        return self.action_tokens * self.linear


def _causal(start: int, length: int) -> float:
    """Visible (query, key) pairs of `length` positions that begin at position `start`."""
    return length * (start + (length + 1) / 2)


@dataclass(frozen=True)
class Decision:
    """Whether a step shares.

    Attributes:
        share: run the prefix schedule.
        reason: why, in one line.
        fallback: the stock schedule runs although the user wanted sharing.
        predicted_speedup: of sharing over the stock schedule.
    """

    share: bool
    reason: str
    fallback: bool
    predicted_speedup: float


def decide(config: PrefixConfig, forest: Forest, cost: CostModel) -> Decision:
    """Whether a step shares: mode "on" always, "auto" where it pays, "observe" and "off" never."""
    speedup = cost.speedup(forest)
    if config.mode == "on":
        return Decision(True, "mode on", False, speedup)
    if config.mode in ("off", "observe"):
        return Decision(False, f"mode {config.mode}", False, speedup)
    if speedup >= config.min_speedup:
        return Decision(True, f"predicted speedup {speedup:.2f}", False, speedup)
    reason = f"predicted speedup {speedup:.2f} is below min_speedup {config.min_speedup:.2f}"
    return Decision(False, reason, True, speedup)
