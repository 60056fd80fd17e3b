"""The naive schedule, for comparison: phases A, B and C of one group after another, with barriers.

Phase A runs the group's inner segments forward on every stage, phase B its waves, one forward one
backward, phase C the inner segments backward; every stage waits for all others between phases.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from megatron_prefix.lab.plans.forest import trees
from megatron_prefix.lab.plans.timeline import Event, Timeline, simulate
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.planner import backward_order
from megatron_prefix.plan.walk import Cost, token_cost
from megatron_prefix.tree import Forest, Segment

PHASES = "ABC"


def phase(plan: Plan, action: Action) -> tuple[int, str]:
    """The group and the phase that an action belongs to; a group is named by its first tree."""
    segment = plan.segments[action.segment]
    group = _groups(plan.segments)[action.segment]
    return group, "B" if not segment.inner else "A" if action.kind == "F" else "C"


@functools.lru_cache(maxsize=4)
def _groups(segments: tuple[Segment, ...]) -> list[int]:
    """The group of every segment: trees that share a segment are one group, small ones too."""
    found = trees(segments)
    group_of = list(range(1 + max((number for numbers in found for number in numbers), default=0)))
    for numbers in found:
        joined = {group_of[number] for number in numbers}
        group_of = [min(joined) if group in joined else group for group in group_of]
    return [group_of[numbers[0]] for numbers in found]


def barrier_plan(forest: Forest, num_ranks: int) -> Plan:
    """Every rank's actions, phase by phase; the barriers themselves are not in a plan.

    Assumes one rollout per wave, and losses that wait for one wave each.
    """
    order, groups = backward_order(forest.segments), _groups(forest.segments)
    programs: list[list[Action]] = [[] for _ in range(num_ranks)]
    for group in sorted({*groups}):
        members = [i for i, number in enumerate(groups) if number == group]
        inner = [i for i in members if forest.segments[i].inner]
        waves = [i for i in members if not forest.segments[i].inner]
        for rank, program in enumerate(programs):
            program += [Action("F", i) for i in inner]
            program += _one_forward_one_backward(waves, num_ranks - 1 - rank)
            program += [Action("B", i) for i in order if i in inner]
    return Plan(forest.segments, tuple(map(tuple, programs)))


def _one_forward_one_backward(waves: list[int], ahead: int) -> Iterator[Action]:
    forwards = [Action("F", i) for i in waves]
    yield from forwards[:ahead]
    for number, index in enumerate(waves):
        yield from forwards[ahead + number : ahead + number + 1]
        yield Action("B", index)


def simulate_with_barriers(plan: Plan, cost: Cost = token_cost) -> Timeline:
    """Plays a `barrier_plan`: no action of a phase begins before the previous phase has ended."""
    free = simulate(plan, cost=cost)  # proves it, and counts its rows
    events: list[list[Event]] = [[] for _ in plan.programs]
    programs = [list(program) for program in plan.programs]
    begin = 0.0
    while any(programs):
        now = min(phase(plan, program[0]) for program in programs if program)
        part = [[a for a in program if phase(plan, a) == now] for program in programs]
        programs = [[a for a in program if phase(plan, a) != now] for program in programs]
        for event in _play(plan, part, cost, begin):
            events[event.rank].append(event)
        begin = max(rank[-1].end for rank in events)
    played = tuple(event for rank in events for event in rank)
    return Timeline(played, begin, free.busy, free.peak_positions)


def _play(plan: Plan, part: list[list[Action]], cost: Cost, begin: float) -> Iterator[Event]:
    """One phase: each rank in order, an action as soon as its message has arrived."""
    clock = [begin] * plan.num_ranks
    ready: dict[tuple[int, Action], float] = {}
    todo = [list(program) for program in part]
    while any(todo):
        for rank, program in enumerate(todo):
            while program:
                action = program[0]
                source = rank + (-1 if action.kind == "F" else 1)
                if 0 <= source < plan.num_ranks and (source, action) not in ready:
                    break
                start = max(clock[rank], ready.get((source, action), begin))
                segment = plan.segments[action.segment]
                clock[rank] = ready[rank, action] = start + cost(segment, action.kind)
                yield Event(rank, program.pop(0), start, clock[rank])
