"""When every action of a plan runs, simulated or measured.  Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_prefix.features.plan_files.rules import check_plan
from megatron_prefix.plan.actions import STEP, Action, Plan
from megatron_prefix.plan.walk import Cost, Seconds, seconds_of, token_cost, walk

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
        peak_positions: see `Plan.peak_positions`.
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


def simulate(
    plan: Plan,
    *,
    cost: Cost = token_cost,
    action_time: ActionTime | None = None,
    ready_after: Sequence[int] | None = None,
) -> Timeline:
    """Checks a plan and plays it.

    Args:
        plan: any plan.
        cost: time of a segment's F or B on one rank.
        action_time: instead of `cost`, where ranks take different times for a segment.
        ready_after: see `planner.loss_ready_after`.

    Raises:
        PlanError: the plan cannot run.
    """
    check_plan(plan, ready_after)
    events: list[list[Event]] = [[] for _ in plan.programs]
    makespan = walk(
        plan,
        seconds_of(plan, cost) if action_time is None else _by_stage(plan, action_time),
        lambda rank, *event: events[rank].append(Event(rank, *event)),
    )
    busy = tuple(sum(event.end - event.start for event in of_rank) for of_rank in events)
    return Timeline(tuple(itertools.chain(*events)), makespan, busy, plan.peak_positions)


def _by_stage(plan: Plan, action_time: ActionTime) -> Seconds:
    indices, stages = range(len(plan.segments)), range(plan.num_stages)
    places = [divmod(stage, plan.num_ranks) for stage in stages]
    return [
        {kind: [action_time(Action(kind, i, chunk), rank) for i in indices] for kind in STEP}
        for chunk, rank in places
    ]
