"""Simulates a plan: proves that it can run, and says how long it takes.  Pure.

A plan is checked first (plan/check.py), then simulated: a rank runs its actions in order, each as
soon as its message is there; sends never block. Neighbours agree on the order of their messages, so
a plan can only hang if ranks wait in a circle, and the simulation finds that.

Time is in tokens of forward work unless a cost is given: a forward costs its positions, a backward
twice that, communication nothing ("Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", section 2.2, counts bubbles so).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.check import PlanError, check_plan
from megatron_prefix.tree import Segment

Cost = Callable[[Segment, str], float]
"""Time of a segment's "F" or "B" on all model chunks of one rank."""

ActionTime = Callable[[Action, int], float]
"""Time of an action on a rank."""


class Event(NamedTuple):
    """One action of one rank in time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every action of a plan runs.

    Attributes:
        events: rank by rank, each rank's in order of time.
        makespan: end of the last action.
        busy: time each rank computes.
        peak_positions: per rank the most positions between forward and end of backward; one on one
            of v model chunks counts 1/v (rounded up).
        unit: of times, "tokens" of forward work or "ms".
    """

    events: tuple[Event, ...]
    makespan: float
    busy: tuple[float, ...]
    peak_positions: tuple[int, ...]
    unit: str = "tokens"

    @property
    def num_actions(self) -> int:
        """Actions of all ranks."""
        return len(self.events)

    @property
    def num_ranks(self) -> int:
        """Pipeline size."""
        return len(self.busy)

    @cached_property
    def bubble_fractions(self) -> tuple[float, ...]:
        """Per rank the share of the makespan in which it waits."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they wait."""
        return sum(self.bubble_fractions) / self.num_ranks

    @property
    def peak_live_positions(self) -> int:
        """`peak_positions` of the rank with the most."""
        return max(self.peak_positions)


def token_cost(segment: Segment, kind: str) -> float:
    """The default cost: a forward costs its positions, a backward twice that; what another rank
    computes costs nothing."""
    return 0 if segment.source >= 0 else segment.padded_length * (1 if kind == "F" else 2)


def simulate(
    plan: Plan,
    *,
    cost: Cost = token_cost,
    action_time: ActionTime | None = None,
    ready_after: Sequence[int] | None = None,
) -> Timeline:
    """Checks a plan and simulates it.

    Args:
        plan: any plan.
        cost: time of a segment's F or B on one rank.
        action_time: instead of `cost`, where ranks take different times for a segment.
        ready_after: see `planner.loss_ready_after`.

    Raises:
        PlanError: the plan cannot run.
    """
    check_plan(plan, ready_after)
    return _Simulation(plan, cost, action_time).run()


# The simulation -----------------------------------------------------------------------------------


class _Simulation:
    """One simulation of a plan that passed `check`."""

    def __init__(self, plan: Plan, cost: Cost, action_time: ActionTime | None) -> None:
        self.plan = plan
        num, stages = len(plan.segments), plan.num_stages
        self.positions = [segment.padded_length for segment in plan.segments]
        self.durations = _durations(plan, cost, action_time)
        # Per kind and stage the time at which the segment's message arrives; None: not yet known.
        # The first stage's forwards and the last stage's backwards wait for no message.
        self.arrivals: dict[str, list[list[float | None]]] = {
            kind: [[None] * num for _ in range(stages)] for kind in "FB"
        }
        self.arrivals["F"][0] = [0.0] * num
        self.arrivals["B"][stages - 1] = [0.0] * num
        # What comes from another pipeline comes to every stage by itself.
        self.received = [segment.source >= 0 for segment in plan.segments]
        for arrivals, index in itertools.product(
            itertools.chain(*self.arrivals.values()), itertools.compress(range(num), self.received)
        ):
            arrivals[index] = 0.0
        self.events: list[list[Event]] = [[] for _ in plan.programs]
        self.clock = [0.0] * plan.num_ranks
        self.live = [0] * plan.num_ranks
        self.peak = [0] * plan.num_ranks

    def run(self) -> Timeline:
        """Runs every rank as far as it can, and again whenever a neighbour got further."""
        plan, num_ranks = self.plan, self.plan.num_ranks
        ready = deque(range(num_ranks))
        queued = [True] * num_ranks
        while ready:
            rank = ready.popleft()
            queued[rank] = False
            if self._advance(rank):
                for neighbour in ((rank + 1) % num_ranks, (rank - 1) % num_ranks):
                    if not queued[neighbour]:
                        queued[neighbour] = True
                        ready.append(neighbour)
        stuck = [r for r in range(num_ranks) if len(self.events[r]) < len(plan.programs[r])]
        if stuck:
            self._deadlock(stuck)
        busy = tuple(sum(event.end - event.start for event in events) for events in self.events)
        return Timeline(
            events=tuple(event for events in self.events for event in events),
            makespan=max(self.clock),
            busy=busy,
            peak_positions=tuple(-(-number // plan.num_chunks) for number in self.peak),
        )

    def _advance(self, rank: int) -> bool:
        """Runs a rank until it must wait; returns whether it ran anything."""
        plan, events = self.plan, self.events[rank]
        program, num_ranks, num_stages = plan.programs[rank], plan.num_ranks, plan.num_stages
        begun, clock, live, peak = len(events), self.clock[rank], self.live[rank], self.peak[rank]
        for place in range(begun, len(program)):
            action = program[place]
            kind, index, chunk, _ = action
            stage = chunk * num_ranks + rank
            arrivals = self.arrivals[kind]
            arrival = arrivals[stage][index]
            if arrival is None:
                break
            start = arrival if arrival > clock else clock
            clock = start + self.durations[stage][kind][index]
            events.append(Event(rank, action, start, clock))
            if self.received[index]:
                continue
            positions = self.positions[index]
            if kind == "F":
                live += positions
                peak = live if live > peak else peak
                target = stage + 1
            else:
                live -= positions
                target = stage - 1
            if 0 <= target < num_stages:
                arrivals[target][index] = clock
        self.clock[rank], self.live[rank], self.peak[rank] = clock, live, peak
        return len(events) > begun

    def _deadlock(self, stuck: Sequence[int]) -> NoReturn:
        plan, waits, marked = self.plan, [], []
        for rank in stuck:
            place = len(self.events[rank])
            action = plan.programs[rank][place]
            source = (rank + (-1 if action.kind == "F" else 1)) % plan.num_ranks
            waits.append(f"rank {rank} at {action} for rank {source}")
            marked.append((rank, place))
        raise PlanError(f"deadlock: {', '.join(waits)} wait in a circle", plan, marked)


def _durations(
    plan: Plan, cost: Cost, action_time: ActionTime | None
) -> list[dict[str, list[float]]]:
    """Times of all segments by stage and kind."""
    if action_time is None:
        share = 1 / plan.num_chunks
        alike = {kind: [cost(segment, kind) * share for segment in plan.segments] for kind in "FB"}
        return [alike] * plan.num_stages
    indices = range(len(plan.segments))
    by_stage = []
    for stage in range(plan.num_stages):
        chunk, rank = divmod(stage, plan.num_ranks)
        by_stage.append(
            {kind: [action_time(Action(kind, i, chunk), rank) for i in indices] for kind in "FB"}
        )
    return by_stage
