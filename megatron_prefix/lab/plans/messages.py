"""Plans with the sends and receives between data-parallel ranks written out, and back.  Pure.

A rank's plan says only where payloads cross (plan/planner.py); files and the plans of a whole job
have every message.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_prefix.plan.actions import Action, Plan, Transfer
from megatron_prefix.tree import Forest
from megatron_prefix.tree.forest import Exchange


def with_messages(plan: Plan, forest: Forest) -> Plan:
    """A plan of `with_crossing` with every exchange written out, as job.py judges it."""
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
    """A program with sends and receives of every level; see features/across/exchanges.py."""
    of = {one.segment: (place, one) for place, one in enumerate(forest.exchanges)}

    def group(action: Action) -> tuple[str, int, int] | None:
        if action.segment not in of:
            return None
        return action.kind, of[action.segment][1].depth, action.chunk

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
