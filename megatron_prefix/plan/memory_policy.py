"""Memory policies: what each segment keeps between its forward and its backward.  Pure."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_prefix.plan.actions import ON_DEVICE, Plan, policies
from megatron_prefix.plan.cost import AGAIN, CostModel, works
from megatron_prefix.plan.memory import MemoryModel, PlanBytes, RankMemory
from megatron_prefix.tree import Segment

MOST_TRIES = 32
"""Peaks that a search lowers; after that all inner segments are recomputed."""
BACKWARDS_AHEAD = 4
"""Backwards before its own during which an offloaded segment may be loaded."""


def leaner(plan: Plan) -> Plan | None:
    """The plan with every inner segment recomputed; None if that changes nothing."""
    waiting = policies(plan.segments, "recompute")
    lean = tuple(
        plan.policy(i) if policy == "retain" else policy for i, policy in enumerate(waiting)
    )
    same = lean == plan.policies or not any(segment.waits for segment in plan.segments)
    return None if same else replace(plan, policies=lean)


@dataclass(frozen=True)
class Rates:
    """Of a rank: FLOPs a second of matrix products in training, and bytes a second between device
    and host in each direction."""

    flops: float
    link: float


@functools.lru_cache(maxsize=32)
def automatic(
    plan: Plan,
    footprint: MemoryModel,
    cost: CostModel,
    rates: Rates,
    free: float,
    may_offload: bool,
) -> tuple[str, ...]:
    """The cheapest policies with which a plan's predicted peak fits.

    While a rank's predicted peak is above `free`, inner segments alive at the peak change their
    policy, those with the lowest price a byte first. The search starts from "retain", and from
    "recompute_act" of all segments if that is cheaper or only that fits. "recompute" costs a
    forward. "offload" costs the time of copies that computation does not hide: stores hide behind
    what runs between the segment's forward and backward, loads behind that backward and those right
    before it. The result depends on the arguments only, so all ranks of a pipeline agree.

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
    plan, memory = replace(plan, policies=()), footprint.of(plan)
    if _largest_peak(memory, ()) <= free:
        return ()
    share = 1 / (plan.num_ranks * footprint.parts * rates.flops)
    seconds = [cost.of_work(work) * share for work in works(plan.segments)]
    retaining = _Choice(plan, memory, seconds, rates, may_offload)
    selected = retaining.fitting(free)
    if not footprint.act:
        return selected
    light = replace(plan, policies=policies(plan.segments, "recompute_act"))
    leaving = _Choice(light, memory, seconds, rates, may_offload)
    fits = _largest_peak(memory, selected) <= free
    if fits and retaining.price <= leaving.price:  # a search only adds to it
        return selected
    less = leaving.fitting(free)
    cheaper = leaving.price < retaining.price and _largest_peak(memory, less) <= free
    return less if cheaper or not fits else selected


def _largest_peak(memory: PlanBytes, policies: tuple[str, ...]) -> float:
    return max(of_rank.peak for of_rank in memory.peaks(policies))


def _computed(segment: Segment) -> bool:
    """Whether this rank computes the segment, and its backward waits for others."""
    return segment.waits and segment.source < 0


class _Choice:
    """The search of `automatic`: starts with a plan's policies, all on the device.

    Attributes:
        plan: with the policies chosen so far.
        price: seconds that they take.
    """

    def __init__(
        self, plan: Plan, memory: PlanBytes, seconds: Sequence[float], rates: Rates, offloads: bool
    ) -> None:
        self.plan, self._memory, self._may_offload = plan, memory, offloads
        self._rates, self._begun, self._seconds = rates, plan, seconds
        ranks = range(plan.num_ranks) if offloads else ()
        self._hidden = {rank: self._windows(rank) for rank in ranks}
        self._on_link = 0.0  # seconds of all stores chosen so far
        self._chosen: list[int] = []  # segments in the order in which they were
        self._become(plan)

    def fitting(self, free: float) -> tuple[str, ...]:
        """Policies within a limit; if none are, those with the lowest peak."""
        lean = leaner(self.plan)
        if lean is None or self._peak() <= free:
            return self.plan.policies
        least = _largest_peak(self._memory, lean.policies)
        if least > free and not self._may_offload:  # a search would take long, and find as little
            return self._become(lean)
        for _ in range(min(MOST_TRIES, 2 * len(lean.segments))):
            memory = self._memory.peaks(self.plan.policies)
            worst = max(range(len(memory)), key=lambda rank: memory[rank].peak)
            if memory[worst].peak <= free or not self.give(
                worst, memory[worst], memory[worst].peak - free
            ):
                break
        if self._peak() > max(free, least):
            return self._become(lean)
        self._spare(free)
        return self.plan.policies

    def _spare(self, free: float) -> None:
        """Undoes the first choices while the later ones suffice: those may have been the ones that
        lower the peak."""
        own = self._begun.policies or ("retain",) * len(self.plan.segments)
        for index in self._chosen[:-1][:MOST_TRIES]:
            if self.plan.policy(index) == "recompute":
                chosen = self.plan
                self._set({index: own[index]})
                if self._peak() > free:
                    self.plan = chosen
                    return
                self.price -= self._seconds[index]

    def _become(self, plan: Plan) -> tuple[str, ...]:
        """Sets policies that are all on the device."""
        recomputed_shares = (
            AGAIN.get(plan.policy(index), 0.0) for index in range(len(plan.segments))
        )
        self.plan, self.price = plan, sum(map(operator.mul, recomputed_shares, self._seconds))
        return plan.policies

    def give(self, rank: int, memory: RankMemory, excess: float) -> bool:
        """Changes policies of segments alive at a rank's peak; False if none is left."""
        index_at_peak = memory.action.segment
        recomputing = memory.action.kind == "B" and self.plan.policy(index_at_peak) == "recompute"
        if recomputing and self._may_offload:
            # That does not fit; an offloaded segment comes back a few layers at a time.
            self._set({index_at_peak: "offload"})
            return True
        saved = self._memory.saved(self.plan.policies)
        offers = sorted(
            self._cheapest(rank, index, max(saved[index], 1.0))
            for index, _ in memory.held
            if self.plan.policy(index) in ON_DEVICE and _computed(self.plan.segments[index])
        )
        changed: dict[int, str] = {}
        for price, index, policy in offers:
            # A segment on several model chunks is offered once for each of them.
            size = self._memory.saved(())[index] if index in changed else saved[index]
            self.price += price * size
            self._chosen.append(index)
            changed[index] = policy
            if policy == "offload":
                self._on_link += size / self._rates.link
            excess -= size
            if excess <= 0:
                break
        if changed:
            self._set(changed)
        return bool(offers)

    def _cheapest(self, rank: int, index: int, size: float) -> tuple[float, int, str]:
        """The cheaper policy of an inner segment: (seconds a byte, segment, policy)."""
        prices = {"recompute": self._seconds[index]}
        if self._may_offload:
            copy = size / self._rates.link
            gap, loading = self._hidden[rank].get(index, (0.0, 0.0))
            waits = max(0.0, self._on_link + copy - gap), max(0.0, copy - loading)
            prices["offload"] = sum(waits)
        policy = min(prices, key=prices.__getitem__)
        return prices[policy] / size, index, policy

    def _set(self, policy_of: Mapping[int, str]) -> None:
        changed = list(self.plan.policies or ["retain"] * len(self.plan.segments))
        for index, policy in policy_of.items():
            changed[index] = policy
        self.plan = replace(self.plan, policies=tuple(changed))

    def _peak(self) -> float:
        return _largest_peak(self._memory, self.plan.policies)

    def _windows(self, rank: int) -> dict[int, tuple[float, float]]:
        """Per inner segment the seconds of computation between its forward and backward, and those
        of its backward and the backwards right before it, during which it may be loaded."""
        program, share = self.plan.programs[rank], 1 / self.plan.num_chunks
        lengths = [
            self._seconds[action.segment] * share * (1 if action.kind == "F" else 2)
            for action in program
        ]
        ends = dict(zip(program, itertools.accumulate(lengths), strict=True))
        windows = {}
        for place, action in enumerate(program):
            if action.kind == "B" and self.plan.segments[action.segment].waits:
                before = program[max(0, place - BACKWARDS_AHEAD) : place]
                run = len([*itertools.takewhile(lambda a: a.kind == "B", reversed(before))])
                gap = ends[action] - lengths[place] - ends[action._replace(kind="F")]
                windows[action.segment] = gap, sum(lengths[place - run : place + 1])
        return windows
