"""What each segment keeps between its forward and its backward.  Pure."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.footprint import Footprint
from megatron_prefix.plan.peak_memory import RankMemory, predict
from megatron_prefix.tree import Segment

BACKWARDS_AHEAD = 4
"""Backwards in a row before an offloaded segment's own in which its tensors may be loaded."""


def policies(segments: Sequence[Segment], memory: str) -> tuple[str, ...]:
    """The policy of every segment of a step, or () where all retain.

    Args:
        segments: of the step.
        memory: the policy of inner segments. A wave's backward follows its forward, so there is
            nothing to win, and it retains. "auto" is `automatic`'s to refine: all retain.
    """
    if memory in ("retain", "auto"):
        return ()
    return tuple(memory if segment.inner else "retain" for segment in segments)


def leaner(plan: Plan) -> Plan | None:
    """The plan with every inner segment recomputed; None where that is how it is."""
    lean = policies(plan.segments, "recompute")
    same = lean == plan.policies or not any(segment.inner for segment in plan.segments)
    return None if same else replace(plan, policies=lean)


@dataclass(frozen=True)
class Rates:
    """How fast a rank computes and copies.

    Attributes:
        flops: matrix FLOPs a second that training reaches.
        link: bytes a second between device and host, in each direction.
    """

    flops: float
    link: float


@functools.lru_cache(maxsize=32)
def automatic(
    plan: Plan,
    footprint: Footprint,
    cost: CostModel,
    rates: Rates,
    free: float,
    may_offload: bool = True,
) -> tuple[str, ...]:
    """The cheapest policies with which a plan's predicted peak fits.

    While a rank's predicted peak is above `free`, inner segments that it holds at that moment give
    way, those first whose bytes are cheapest: "recompute" costs a forward; "offload" costs what of
    its stores does not hide behind the computation between the segment's forward and its backward,
    and of its loads behind that backward and those right before it. All ranks of a pipeline get the
    same answer, since all of it is in the arguments.

    Args:
        plan: whose own policies do not count.
        footprint: of the model.
        cost: of the model.
        rates: of the slowest rank.
        free: bytes of the rank that has least.
        may_offload: whether "offload" is allowed.

    Returns:
        A policy a segment, or () where all retain. Where nothing fits, the leanest found.
    """
    choice = _Choice(plan, footprint, cost, rates, may_offload)
    for _ in range(2 * len(plan.segments)):
        memory = predict(choice.plan, footprint)
        worst = max(range(len(memory)), key=lambda rank: memory[rank].peak)
        if memory[worst].peak <= free or not choice.give(
            worst, memory[worst], memory[worst].peak - free
        ):
            break
    found = [choice.plan.policies, policies(plan.segments, "recompute")]
    peaks = [max(one.peak for one in predict(replace(plan, policies=p), footprint)) for p in found]
    return found[0] if peaks[0] <= max(free, peaks[1]) else found[1]


class _Choice:
    """Policies on their way from "retain" for all."""

    def __init__(
        self, plan: Plan, footprint: Footprint, cost: CostModel, rates: Rates, may_offload: bool
    ) -> None:
        self.plan = replace(plan, policies=())
        self._footprint, self._rates = footprint, rates
        self._options = ("recompute", "offload") if may_offload else ("recompute",)
        share = 1 / (plan.num_ranks * footprint.parts * rates.flops)
        self._seconds = [cost.segment(segment) * share for segment in plan.segments]
        self._hidden = {rank: self._windows(rank) for rank in range(plan.num_ranks)}
        self._on_link = 0.0  # seconds that stores of segments chosen so far take

    def give(self, rank: int, memory: RankMemory, excess: float) -> bool:
        """Changes policies of segments that a rank holds at its peak; whether any was left."""
        again = memory.action.segment
        if memory.action.kind == "B" and self.plan.policy(again) == "recompute":
            # What it recomputes does not fit; of an offloaded segment a few layers come at a time.
            if "offload" not in self._options:
                return False
            self._set(again, "offload")
            return True
        offers = sorted(
            self._cheapest(rank, index)
            for index, _ in memory.held
            if self.plan.segments[index].inner and self.plan.policy(index) == "retain"
        )
        for _, index, policy in offers:
            size = self._size(index)
            self._set(index, policy)
            if policy == "offload":
                self._on_link += size / self._rates.link
            excess -= size
            if excess <= 0:
                break
        return bool(offers)

    def _cheapest(self, rank: int, index: int) -> tuple[float, int, str]:
        """Seconds a byte of the cheaper policy of an inner segment."""
        size = max(self._size(index), 1.0)
        prices = {"recompute": self._seconds[index]}
        if "offload" in self._options:
            copy = size / self._rates.link
            between, loading = self._hidden[rank].get(index, (0.0, 0.0))
            waits = max(0.0, self._on_link + copy - between), max(0.0, copy - loading)
            prices["offload"] = sum(waits)
        policy = min(prices, key=prices.__getitem__)
        return prices[policy] / size, index, policy

    def _size(self, index: int) -> float:
        """Bytes of a segment's saved tensors on one rank."""
        one = self._footprint
        rows = self.plan.segments[index].padded_length / one.parts
        return rows * one.inner * one.num_layers * self.plan.num_chunks

    def _set(self, index: int, policy: str) -> None:
        found = list(self.plan.policies or ["retain"] * len(self.plan.segments))
        found[index] = policy
        self.plan = replace(self.plan, policies=tuple(found))

    def _windows(self, rank: int) -> dict[int, tuple[float, float]]:
        """Per inner segment what a rank computes from its forward to its backward, and while the
        segment may be loaded: in its backward and those right before it."""
        program, share = self.plan.programs[rank], 1 / self.plan.num_chunks
        lengths = [
            self._seconds[action.segment] * share * (1 if action.kind == "F" else 2)
            for action in program
        ]
        ends = dict(zip(program, itertools.accumulate(lengths), strict=True))
        found = {}
        for place, action in enumerate(program):
            if action.kind == "B" and self.plan.segments[action.segment].inner:
                before = program[max(0, place - BACKWARDS_AHEAD) : place]
                row = len([*itertools.takewhile(lambda a: a.kind == "B", reversed(before))])
                between = ends[action] - lengths[place] - ends[action._replace(kind="F")]
                found[action.segment] = between, sum(lengths[place - row : place + 1])
        return found
