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

from collections.abc import Iterator
from dataclasses import replace

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.tree import Forest


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


def _beginning(forest: Forest, chunks: range) -> Iterator[Action]:
    """In a level what a rank computes, then what it receives."""
    begin = [*forest.exchanges]
    begin.sort(key=lambda one: (one.level, forest.segments[one.segment].source >= 0))
    return (Action("F", one.segment, chunk) for chunk in chunks for one in begin)


def _ending(forest: Forest, chunks: range) -> Iterator[Action]:
    end = [*reversed(forest.exchanges)]
    end.sort(key=lambda one: (-one.level, forest.segments[one.segment].source < 0))
    return (Action("B", one.segment, chunk) for chunk in reversed(chunks) for one in end)
