"""Memory policies: what each segment keeps between its forward and its backward.  Pure."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

from megatron_prefix.plan.actions import Plan, policies
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.footprint import Footprint
from megatron_prefix.plan.peak_memory import RankMemory, predict
from megatron_prefix.tree import Segment

MOST_TRIES = 32
"""Peaks that are looked at one after the other; where more would have to be, all is recomputed."""
BACKWARDS_AHEAD = 4
"""An offloaded segment is loaded during at most so many backwards before its own."""


def leaner(plan: Plan) -> Plan | None:
    """The plan with every inner segment recomputed; None where it is already."""
    lean = policies(plan.segments, "recompute")
    same = lean == plan.policies or not any(segment.waits for segment in plan.segments)
    return None if same else replace(plan, policies=lean)


@dataclass(frozen=True)
class Rates:
    """How fast a rank computes and copies.

    Attributes:
        flops: FLOPs a second of matrix products in training.
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

    While a rank's predicted peak is above `free`, inner segments that it holds at the peak change
    from "retain" to a cheaper policy, those with the lowest price a byte first. "recompute" costs a
    forward. "offload" costs the time of its copies that computation does not hide: stores hide
    behind what runs between the segment's forward and backward, loads behind that backward and
    those right before it. The answer depends on the arguments only, so all ranks of a pipeline
    agree.

    Args:
        plan: its own policies are ignored.
        footprint: of the model.
        cost: of the model.
        rates: of the slowest rank.
        free: free bytes of the rank with the least.
        may_offload: whether "offload" is allowed.

    Returns:
        A policy a segment, or () where all retain. If nothing fits, the one with the lowest peak.
    """
    if max(one.peak for one in predict(replace(plan, policies=()), footprint)) <= free:
        return ()
    lean = policies(plan.segments, "recompute")
    least = max(one.peak for one in predict(replace(plan, policies=lean), footprint))
    if least > free and not may_offload:  # a search would take long, and find as little
        return lean
    choice = _Choice(plan, footprint, cost, rates, may_offload)
    for _ in range(min(MOST_TRIES, 2 * len(plan.segments))):
        memory = predict(choice.plan, footprint)
        worst = max(range(len(memory)), key=lambda rank: memory[rank].peak)
        if memory[worst].peak <= free or not choice.give(
            worst, memory[worst], memory[worst].peak - free
        ):
            break
    peak = max(one.peak for one in predict(choice.plan, footprint))
    return choice.plan.policies if peak <= max(free, least) else lean


def _computed(segment: Segment) -> bool:
    """Whether a segment waits for others, and this rank runs it itself."""
    return segment.waits and segment.source < 0


class _Choice:
    """The search of `automatic`: starts with "retain" for all segments."""

    def __init__(
        self, plan: Plan, footprint: Footprint, cost: CostModel, rates: Rates, may_offload: bool
    ) -> None:
        self.plan = replace(plan, policies=())
        self._footprint, self._rates = footprint, rates
        self._options = ("recompute", "offload") if may_offload else ("recompute",)
        share = 1 / (plan.num_ranks * footprint.parts * rates.flops)
        self._seconds = [cost.segment(segment) * share for segment in plan.segments]
        self._hidden = {rank: self._windows(rank) for rank in range(plan.num_ranks)}
        self._on_link = 0.0  # seconds of all stores chosen so far

    def give(self, rank: int, memory: RankMemory, excess: float) -> bool:
        """Changes policies of segments that a rank holds at its peak; False where none is left."""
        again = memory.action.segment
        if memory.action.kind == "B" and self.plan.policy(again) == "recompute":
            # Its recomputation does not fit; an offloaded segment comes back a few layers at a
            # time.
            if "offload" not in self._options:
                return False
            self._set(again, "offload")
            return True
        offers = sorted(
            self._cheapest(rank, index)
            for index, _ in memory.held
            if self.plan.policy(index) == "retain" and _computed(self.plan.segments[index])
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
        """The cheaper policy of an inner segment: (seconds a byte, segment, policy)."""
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
        positions = self.plan.segments[index].padded_length / one.parts
        return positions * one.inner * one.num_layers * self.plan.num_chunks

    def _set(self, index: int, policy: str) -> None:
        found = list(self.plan.policies or ["retain"] * len(self.plan.segments))
        found[index] = policy
        self.plan = replace(self.plan, policies=tuple(found))

    def _windows(self, rank: int) -> dict[int, tuple[float, float]]:
        """Per inner segment the seconds a rank computes between its forward and its backward, and
        those during which it may be loaded: its backward and the backwards right before it."""
        program, share = self.plan.programs[rank], 1 / self.plan.num_chunks
        lengths = [
            self._seconds[action.segment] * share * (1 if action.kind == "F" else 2)
            for action in program
        ]
        ends = dict(zip(program, itertools.accumulate(lengths), strict=True))
        found = {}
        for place, action in enumerate(program):
            if action.kind == "B" and self.plan.segments[action.segment].waits:
                before = program[max(0, place - BACKWARDS_AHEAD) : place]
                run = len([*itertools.takewhile(lambda a: a.kind == "B", reversed(before))])
                between = ends[action] - lengths[place] - ends[action._replace(kind="F")]
                found[action.segment] = between, sum(lengths[place - run : place + 1])
        return found
