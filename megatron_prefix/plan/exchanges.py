"""Where payloads cross data-parallel ranks in a rank's program.  Pure.

A segment of another rank has an F, which gets its payload, and a B, which sends its gradients back.
The F of a segment that others get sends its payload as well, and its B gets their gradients first.
All ranks have the same order: the payloads that cross when a step begins, level by level of the
trees, what a rank runs for itself, the gradients that cross when the step ends. A level crosses at
once: forward when a rank has computed what it owns of it, backward before a rank needs what others
send back; so what ranks own of a level runs side by side. Whatever an exchange waits for comes
before it on every rank, and none waits in a circle, even if every exchange holds up both of its
ranks. Where a rank has several model chunks, what crosses does so chunk by chunk: forward from the
first, backward from the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_prefix.plan.actions import Action, Plan, Transfer
from megatron_prefix.tree import Forest
from megatron_prefix.tree.forest import Exchange


def with_crossing(plan: Plan, forest: Forest) -> Plan:
    """A plan in which what crosses data-parallel ranks does so when the step begins and ends.

    Args:
        plan: that runs segments in F-order, and a segment's backward after that of its readers.
        forest: its segments.
    """
    if not forest.exchanges:
        return plan
    chunks = range(plan.num_chunks)
    crossing = {one.segment for one in forest.exchanges}
    begin, end = [*_beginning(forest, chunks)], [*_ending(forest, chunks)]
    programs = (
        (*begin, *(action for action in program if action.segment not in crossing), *end)
        for program in plan.programs
    )
    return replace(plan, programs=tuple(programs))


def with_messages(plan: Plan, forest: Forest) -> Plan:
    """A plan of `with_crossing` with every exchange written out, as lab/plans/job.py judges it."""
    transfers = tuple(
        Transfer(one.segment, peer, spans)
        for one in forest.exchanges
        if forest.segments[one.segment].source < 0
        for peer, spans in one.peers
    )
    programs = tuple(tuple(_with_messages(program, forest)) for program in plan.programs)
    return replace(plan, programs=programs, transfers=transfers)


def without_messages(plan: Plan) -> Plan:
    """The inverse of `with_messages`: received segments have an F and a B again. A message that no
    segment has stays, for `check` to find."""
    crossing = {(one.segment, one.peer) for one in plan.transfers}
    for index, segment in enumerate(plan.segments):
        crossing.add((index, segment.source))
    programs = tuple(tuple(_local(program, plan, crossing)) for program in plan.programs)
    return replace(plan, programs=programs, transfers=())


def _local(
    program: Iterable[Action], plan: Plan, crossing: Container[tuple[int, int]]
) -> Iterator[Action]:
    for action in program:
        if action.peer < 0 or (action.segment, action.peer) not in crossing:
            yield action
        elif plan.segments[action.segment].source >= 0:
            yield Action("F" if action.kind == "R" else "B", action.segment, action.chunk)


def _with_messages(program: Sequence[Action], forest: Forest) -> Iterator[Action]:
    """A program with sends and receives of every level, as run/across/exchanges.py makes them."""
    of = {one.segment: (place, one) for place, one in enumerate(forest.exchanges)}

    def group(action: Action) -> tuple[str, int, int] | None:
        if action.segment not in of:
            return None
        return action.kind, of[action.segment][1].level, action.chunk

    for key, actions in itertools.groupby(program, group):
        if key is None:
            yield from actions
            continue
        here, forward = list(actions), key[0] == "F"
        computed = [one for one in here if forest.segments[one.segment].source < 0]
        here.sort(key=lambda action: of[action.segment][0], reverse=not forward)
        crossing = [sent for one in here for sent in _messages(one, of[one.segment][1], forest)]
        yield from computed + crossing if forward else crossing + computed


def _messages(action: Action, one: Exchange, forest: Forest) -> Iterator[Action]:
    """What crosses with a segment: its payload forward, its gradients backward."""
    received = forest.segments[action.segment].source >= 0
    kind = "S" if (action.kind == "F") is not received else "R"
    return (Action(kind, action.segment, action.chunk, peer) for peer, _ in one.peers)


def _beginning(forest: Forest, chunks: range) -> Iterator[Action]:
    """In a level what a rank computes, then what it receives."""
    begin = [*forest.exchanges]
    begin.sort(key=lambda one: (one.level, forest.segments[one.segment].source >= 0))
    return (Action("F", one.segment, chunk) for chunk in chunks for one in begin)


def _ending(forest: Forest, chunks: range) -> Iterator[Action]:
    end = [*reversed(forest.exchanges)]
    end.sort(key=lambda one: (-one.level, forest.segments[one.segment].source < 0))
    return (Action("B", one.segment, chunk) for chunk in reversed(chunks) for one in end)
