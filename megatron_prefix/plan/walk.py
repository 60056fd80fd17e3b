"""Plays a plan: when every action runs, and that none waits for ever.  Pure.

A rank runs its actions in order, each as soon as its message is there; sends never block.
Neighbours agree on the order of their messages (features/plan_files/rules.py), so a plan can only
hang if ranks wait in a circle, and playing it finds that.

Time has any unit. In tokens of forward work a forward costs its positions, a backward twice that,
communication nothing ("Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 2.2, counts bubbles so).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from megatron_prefix.plan.actions import STEP, Action, Plan
from megatron_prefix.plan.error import PlanError
from megatron_prefix.tree import Segment

Cost = Callable[[Segment, str], float]
"""Time of a segment's "F" or "B" on all model chunks of one rank."""
Seconds = Sequence[Mapping[str, Sequence[float]]]
"""By stage, kind and segment the time of an action."""
Visitor = Callable[[int, Action, float, float], None]
"""Sees a rank's action with its begin and end; those of one rank in order."""


def token_cost(segment: Segment, kind: str) -> float:
    """In tokens of forward work; what another rank computes costs nothing."""
    return 0 if segment.source >= 0 else segment.padded_length * (1 if kind == "F" else 2)


def seconds_of(plan: Plan, cost: Cost = token_cost) -> Seconds:
    """A cost by stages that take equally long."""
    share = 1 / plan.num_chunks
    alike = {kind: [cost(segment, kind) * share for segment in plan.segments] for kind in STEP}
    return [alike] * plan.num_stages


def first_arrivals(num_stages: int, alike: Sequence[float]) -> dict[str, list[list[float]]]:
    """By kind, stage and segment when a message is there: `alike` but for the first stage's
    forwards and the last one's backwards, which wait for none."""
    arrivals = {kind: [[*alike] for _ in range(num_stages)] for kind in STEP}
    arrivals["F"][0] = arrivals["B"][-1] = [0.0] * len(alike)
    return arrivals


def walk(plan: Plan, seconds: Seconds, *visitors: Visitor) -> float:
    """Plays a plan that `check_plan` accepts, or the planner made; returns when it ends.

    Raises:
        PlanError: ranks wait in a circle.
    """
    num_ranks, num_stages = plan.num_ranks, plan.num_stages
    # What comes from another pipeline comes to every stage by itself.
    received = [segment.source >= 0 for segment in plan.segments]
    arrivals = first_arrivals(num_stages, [0.0 if there else math.inf for there in received])
    clocks, places = [0.0] * num_ranks, [0] * num_ranks
    ready = dict.fromkeys(range(num_ranks))
    while ready:
        rank, _ = ready.popitem()
        clock = clocks[rank]
        for action in itertools.islice(plan.programs[rank], places[rank], None):
            kind, index, chunk, _ = action
            stage = chunk * num_ranks + rank
            start = arrivals[kind][stage][index]
            if start == math.inf:
                break
            start = start if start > clock else clock
            clock = start + seconds[stage][kind][index]
            for visit in visitors:
                visit(rank, action, start, clock)
            places[rank] += 1
            stage += STEP[kind]
            if 0 <= stage < num_stages and not received[index]:
                arrivals[kind][stage][index] = clock
                ready[stage % num_ranks] = None
        clocks[rank] = clock
    stuck = [rank for rank in range(num_ranks) if places[rank] < len(plan.programs[rank])]
    if stuck:
        _deadlock(plan, [(rank, places[rank]) for rank in stuck])
    return max(clocks)


def _deadlock(plan: Plan, cells: Sequence[tuple[int, int]]) -> NoReturn:
    waits = []
    for rank, place in cells:
        action = plan.programs[rank][place]
        source = (rank - STEP[action.kind]) % plan.num_ranks
        waits.append(f"rank {rank} at {action} for rank {source}")
    raise PlanError(f"deadlock: {', '.join(waits)} wait in a circle", plan, cells)
