"""Where payloads cross data-parallel ranks in a rank's program.  Pure.

A segment of another rank has an F, which gets its payload, and a B, which sends its gradients back.
The F of a segment that others get sends its payload as well, and its B gets their gradients first.
All ranks have the same windows (tree/across_ranks.py), and in each of them the same order: the
payloads that cross when it begins, what a rank runs for itself, the gradients that cross when it
ends: those of the deepest spans first, and of one depth all of them before a rank runs the
backwards that they are for. So whatever an exchange waits for comes before it on every rank, and
none waits in a circle, even if every exchange holds up both of its ranks; and the backwards of
shared prompts run side by side on their ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from megatron_prefix.plan.actions import Action, Plan, Transfer
from megatron_prefix.tree import Forest
from megatron_prefix.tree.forest import Exchange


def in_windows(plan: Plan, forest: Forest) -> Plan:
    """A plan in which what crosses data-parallel ranks does so when windows begin and end.

    Args:
        plan: that runs segments in F-order, and a segment's backward after that of its readers.
        forest: its segments.

    Raises:
        ValueError: several windows in a pipeline, whose stages run ahead of their windows; or
            virtual stages.
    """
    if not forest.exchanges:
        return plan
    if plan.num_chunks > 1 or (plan.num_ranks > 1 and forest.num_windows > 1):
        raise ValueError("a pipeline that exchanges has one window and no virtual stages")
    return replace(plan, programs=tuple(tuple(_ordered(one, forest)) for one in plan.programs))


def with_messages(plan: Plan, forest: Forest) -> Plan:
    """A plan of `in_windows` with every exchange written out, as plan/job.py judges it."""
    transfers = tuple(
        Transfer(one.segment, peer, spans)
        for one in forest.exchanges
        if forest.segments[one.segment].source < 0
        for peer, spans in one.peers
    )
    programs = tuple(tuple(_spelled(program, forest)) for program in plan.programs)
    return replace(plan, programs=programs, transfers=transfers)


def coming_back(forest: Forest, window: int) -> list[list[Exchange]]:
    """The exchanges of gradients when a window ends: those of each depth, the deepest first, in the
    order of all ranks."""
    depths: dict[int, int] = {}
    for one in forest.exchanges:
        above = (depths[i] for i in forest.segments[one.segment].parents if i in depths)
        depths[one.segment] = 1 + max(above, default=-1)
    alike: dict[int, list[Exchange]] = {}
    for one in reversed(forest.exchanges):
        if one.last == window:
            alike.setdefault(depths[one.segment], []).append(one)
    return [alike[depth] for depth in sorted(alike, reverse=True)]


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


def _spelled(program: Iterable[Action], forest: Forest) -> Iterator[Action]:
    """A program with its sends and receives, as run/executor.py makes them."""
    exchange_of = {one.segment: one for one in forest.exchanges}
    windows = map(functools.partial(coming_back, forest), range(forest.num_windows))
    back = {one.segment: alike for window in windows for alike in window for one in alike}
    for action in program:
        index, forward = action.segment, action.kind == "F"
        received = forest.segments[index].source >= 0
        if not forward:
            waiting = back.get(index, [])
            while waiting:  # all of one depth, when the first of them is due
                yield from _messages(waiting.pop(0), forest, "RS")
        if not received:
            yield action
        if forward and index in exchange_of:
            yield from _messages(exchange_of[index], forest, "SR")


def _messages(one: Exchange, forest: Forest, kinds: str) -> Iterator[Action]:
    """Of the rank that computes a segment, or of one that receives it."""
    kind = kinds[forest.segments[one.segment].source >= 0]
    return (Action(kind, one.segment, 0, peer) for peer, _ in one.peers)


def _ordered(program: tuple[Action, ...], forest: Forest) -> Iterator[Action]:
    crossing = {one.segment for one in forest.exchanges}
    window = -1
    for action in program:
        if action.segment in crossing:
            continue
        while window < forest.windows[action.segment] and action.kind == "F":
            yield from _ending(forest, window)
            window += 1
            yield from _beginning(forest, window)
        yield action
    while window < forest.num_windows - 1:
        yield from _ending(forest, window)
        window += 1
        yield from _beginning(forest, window)
    yield from _ending(forest, window)


def _beginning(forest: Forest, window: int) -> Iterator[Action]:
    return (Action("F", one.segment) for one in forest.exchanges if one.first == window)


def _ending(forest: Forest, window: int) -> Iterator[Action]:
    for alike in coming_back(forest, window):  # what is sent back, then what the rank computes
        for one in sorted(alike, key=lambda one: forest.segments[one.segment].source < 0):
            yield Action("B", one.segment)
