"""What a step computes, and what that costs in FLOPs or in seconds.  Pure.

Work has six features: positions, scored positions, visible (query, key) pairs, actions, attention
calls and ancestors' positions seen. A model has a price for each, forward and backward. In FLOPs
these are of matrix products, and a backward costs two forwards ("Schedule-Level Shared-Prefix Reuse
for LLM RL Training", section 3.2; "AReaL-DTA", section 4, balances the same quantity). In seconds
they are of one rank: guessed from FLOPs until actions have been measured (features/measure).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.layer_numbers import LayerWork
from megatron_prefix.tree import Forest, Segment

ACTION_SECONDS, CALL_SECONDS = 3e-4, 5e-5
"""A dense layer's forward beyond its FLOPs, and an attention call's: launches of kernels."""
FLOPS_PER_SECOND = {"cuda": 4e14, "cpu": 5e10}
"""A guess for each of torch's types of device, until actions have been measured."""


class Work(NamedTuple):
    """Work of one or more actions, in all layers.

    Attributes:
        positions: computed, padding included.
        scored: positions that go through the output layer: those with loss.
        pairs: visible (query, key) pairs.
        actions: microbatches, or segments.
        calls: attention calls of a layer.
        seen: positions of ancestors whose payload a layer reads.
    """

    positions: float = 0.0
    scored: float = 0.0
    pairs: float = 0.0
    actions: float = 0.0
    calls: float = 0.0
    seen: float = 0.0


def segment_work(segment: Segment) -> Work:
    """The forward of one segment; of one that another rank computes only the output layer."""
    if segment.source >= 0:
        return Work(scored=segment.num_read)
    positions = segment.padded_length
    pairs = sum(causal_pairs(span.start, span.padded) for span in segment.spans)
    calls = 1 + any(span.start > 0 for span in segment.spans)  # own keys, and those of ancestors
    visible = segment.above
    if visible is None:  # upper bound: common ancestors of several parents count repeatedly
        visible = sum({span.parent: span.start for span in segment.spans}.values())
    return Work(positions, segment.num_read, pairs, 1, calls, visible)


@functools.lru_cache(maxsize=4)
def works(segments: tuple[Segment, ...]) -> tuple[Work, ...]:
    """The forwards of all segments."""
    return tuple(map(segment_work, segments))


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


AGAIN = {"recompute": 1.0, "recompute_act": 0.05}
"""Of a segment's forward, what its backward computes again, by memory policy. An activation
function reads and writes each number once, and what it gives is copied: for Llama3-8B 143 kB a
position and layer, 36 ns at 4 TB/s, beside 730 ns of matrix products."""
NUM_FEATURES = 2 * len(Work._fields)
Features = NDArray[np.float64]
"""Work of forwards, then of backwards: float64 [NUM_FEATURES]."""


def features(work: Work, kinds: str) -> Features:
    """Of the forward of `work` ("F"), its backward ("B") or both ("FB")."""
    forward, backward = (work if kind in kinds else Work() for kind in "FB")
    return np.array((*forward, *backward), np.float64)


def action_features(plan: Plan, action: Action, rank: int) -> Features:
    """Of one action of a rank; a backward includes recomputation. Only the last stage has the
    output layer, and a model chunk has its share of a rank's layers."""
    share, is_last = 1 / plan.num_chunks, plan.stage(rank, action.chunk) == plan.num_stages - 1
    work = segment_work(plan.segments[action.segment])
    recomputed = AGAIN.get(plan.policy(action.segment), 0.0) if action.kind == "B" else 0.0
    computed = features(work, action.kind) + recomputed * features(work, "F")
    return computed * (2 * (share, is_last, share, 1, share, share))


@dataclass(frozen=True)
class CostModel:
    """Prices of work: FLOPs of a whole model, or seconds of one rank.

    Attributes:
        prices: of a unit of each feature, of forwards and then of backwards.
        stock_factor: measured time of whole steps with the stock schedule over what prices say.
        prefix_factor: the same with the prefix schedule.
        launches: of an action's forward, in dense layers; None: as many as the model has layers.
    """

    prices: tuple[float, ...]
    stock_factor: float = 1.0
    prefix_factor: float = 1.0
    launches: float | None = None

    @classmethod
    def of_flops(
        cls,
        linear: float,
        head: float,
        attention: float,
        action_tokens: float = 32.0,
        expansion: float = 0.0,
    ) -> CostModel:
        """FLOPs of matrix products, and for kernel launches an overhead an action.

        Args:
            linear: FLOPs of a position's forward in all layers.
            head: of a position's in the output layer.
            attention: of a (query, key) pair's in all layers.
            action_tokens: overhead of one action, in positions of linear work.
            expansion: of an ancestor's position, where keys are made of its payload; a backward
                makes them again.
        """
        forward = Work(linear, head, attention, action_tokens * linear, seen=expansion)
        backward = Work(*(2 * price for price in forward))._replace(seen=3 * expansion)
        return cls((*forward, *backward))

    @classmethod
    def of_layers(cls, layers: Iterable[LayerWork], hidden_size: int, vocab_size: int) -> CostModel:
        """Of a model; `layers`: of all slots of all layers."""
        layers = list(layers)
        flops = cls.of_flops(
            linear=2.0 * sum(layer.products for layer in layers),
            head=2.0 * hidden_size * vocab_size,
            attention=2.0 * sum(layer.pairs for layer in layers),
            expansion=2.0 * sum(layer.seen for layer in layers),
        )
        return replace(flops, launches=sum(layer.launches for layer in layers))

    def in_seconds(
        self,
        flops_per_second: float,
        num_layers: int,
        num_ranks: int = 1,
        num_chunks: int = 1,
        frozen: float = 0.0,
    ) -> CostModel:
        """Seconds of one rank, guessed from FLOPs: one rate for all, and launches of kernels.

        Args:
            flops_per_second: of all ranks that share the work of a layer.
            num_layers: of the whole model.
            num_ranks: pipeline size.
            num_chunks: model chunks a rank.
            frozen: share of the weights that are not trained, 0 to 1: they have no gradient to
                compute, so sharing saves less beside attention and overheads.
        """
        flop, layers, unit = 1 / flops_per_second, num_layers / num_ranks, self.forward
        launches = num_layers if self.launches is None else self.launches
        forward = Work(
            unit.positions * flop / num_ranks, unit.scored * flop, unit.pairs * flop / num_ranks,
            ACTION_SECONDS * launches / num_ranks / num_chunks, CALL_SECONDS * layers,
            unit.seen * flop / num_ranks,
        )  # fmt: skip
        backwards = (2 - frozen, 2 - frozen, 2, 2, 2, 3 - frozen)
        return CostModel(
            (*forward, *(n * price for n, price in zip(backwards, forward, strict=True)))
        )

    @property
    def forward(self) -> Work:
        """Prices of forwards."""
        return Work(*self.prices[: len(Work._fields)])

    @functools.cached_property
    def _vector(self) -> Features:
        return np.array(self.prices)

    def of(self, features: Features) -> float:
        """Cost of features, without the factors of whole steps."""
        return float(features @ self._vector)

    def of_work(self, work: Work, kind: str = "F") -> float:
        """Cost of one forward, or of its backward ("B"); as fast as Python can."""
        prices = self.prices if kind == "F" else self.prices[len(work) :]
        return sum(map(operator.mul, work, prices))

    def action(self, plan: Plan, action: Action, rank: int) -> float:
        """Cost of one action of a rank; see `action_features`."""
        return self.of(action_features(plan, action, rank))

    def segment(self, segment: Segment, kind: str = "F") -> float:
        """Cost of one segment's forward, or of its backward ("B")."""
        return self.of_work(segment_work(segment), kind)

    def stock(self, forest: Forest, microbatch_of: Sequence[int] | None = None) -> float:
        """Cost of the stock schedule's forwards; see `stock_work`."""
        return self.of_work(stock_work(forest, microbatch_of))

    def prefix(self, forest: Forest) -> float:
        """Cost of the prefix schedule's forwards."""
        return sum(map(self.segment, forest.segments))

    def speedup(self, forest: Forest, microbatch_of: Sequence[int] | None = None) -> float:
        """Cost of the stock schedule over that of the prefix schedule."""
        if not forest.segments:
            return 1.0
        return self.stock(forest, microbatch_of) / self.prefix(forest)
