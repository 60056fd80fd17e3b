"""One order of all actions and messages of a pipeline, kept by every rank.  Pure.

On a GPU a message is two kernels, one at each end, and neither ends before both have begun. A
waiting kernel may hold up everything that its device gets after it: when streams share one queue to
the device (CUDA_DEVICE_MAX_CONNECTIONS=1, which trainers set) and two messages of a link follow one
another; when a kernel is loaded at its first use, which may wait for all running kernels; when
launches block. So a rank is taken to do one thing after another, and a message to end when both its
ends have reached it.

Ranks that keep to one order cannot wait in a circle even then. Of all that has not happened yet,
take the first in the order: every rank it concerns has done everything before it, so it can happen.
(NCCL's user guide, "Using multiple NCCL communicators concurrently", also asks for one order.)

The order is that of a walk: an action at the time it begins, a message at the time the action that
makes it ends. So a send is issued right after its action and a receive before it is needed. Where
streams are independent, only the action that uses a message waits for it.

Where prompts cross data-parallel ranks, pipelines with other segments wait for one another, stage
by stage. So the order has *phases*, the same ones in all pipelines: forward the levels of the
trees, model chunk by model chunk, then what ranks run for themselves, then the levels backward. A
level crosses between two phases, on all stages: everything of a phase comes before it, on every
rank, and nothing of a later one. A receive for the next phase waits until the level has crossed.

Where data-parallel ranks sum counts of their microbatches (features/experts/sums.py), pipelines
wait for one another in every sum. So a sum has one place in the order, the same on all stages,
behind an action of the last rank, and all pipelines keep one order: what each of them has before
its first sums, these on every stage, what each has before the next, and so on. The place is behind
all forwards that a sum counts, since their last ones are the last rank's, and before all backwards
that wait for it, since its first ones are that rank's, too. (lab/plans/joint_judge.py plays both.)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from megatron_prefix.plan.actions import STEP, Action, Plan
from megatron_prefix.plan.walk import seconds_of, walk


class StageMessage(NamedTuple):
    """Of two neighbours in a pipeline: the sender's action that makes a message, and the receiver's
    that needs it."""

    sender: int
    receiver: int
    made_by: Action
    used_by: Action


class Sum(NamedTuple):
    """Behind an action of the last rank sums of so many microbatches, from the first on, have begun
    on all stages."""

    made_by: Action
    number: int


Gap = list[StageMessage | Sum]
Depths = tuple[tuple[int, int], ...]
"""Segments that cross data-parallel ranks, each with its depth; see tree.forest.Exchange."""

Phase = tuple[int, int, int]
_OWN = (1, 0, 0)
"""The phase of what ranks run for themselves."""


@functools.lru_cache(maxsize=4)
def timetable(
    plan: Plan, depths: Depths = (), only: int | None = None, *sums: Sum
) -> tuple[tuple[int, Action] | StageMessage | Sum, ...]:
    """The order of all actions, each with its rank, messages and sums of a plan that can run; of
    `only` one rank, if given, its own.

    With `depths` of what crosses the plan is one of `planner.with_crossing`.
    """
    entries: list[tuple[tuple[Phase, float, int, int], tuple[int, Action] | StageMessage | Sum]]
    entries, depth_of, sum_behind = [], dict(depths), {each.made_by: each for each in sums}

    def enter(rank: int, action: Action, begin: float, end: float) -> None:
        if sums and rank == plan.num_ranks - 1 and action in sum_behind:
            entries.append(((phase(action, depth_of), end, 0, rank + 1), sum_behind[action]))
        if only not in (None, rank, (rank + STEP[action.kind]) % plan.num_ranks):
            return
        when = phase(action, depth_of)
        if only in (None, rank):
            entries.append(((when, begin, 1, rank), (rank, action)))
        receiver = plan.receiver(rank, action)
        if receiver is not None and plan.segments[action.segment].source < 0:
            message = StageMessage(rank, receiver[0], action, receiver[1])
            entries.append(((when, end, 0, rank), message))  # before the actions that begin then

    walk(plan, seconds_of(plan), enter)
    entries.sort(key=lambda entry: entry[0])  # stable: those of a rank stay in order
    return tuple(entry for _, entry in entries)


def phase(action: Action, depth_of: Mapping[int, int]) -> Phase:
    """The phase of an action, and of the message that it makes; later ones are larger."""
    depth = depth_of.get(action.segment)
    if depth is None:
        return _OWN
    return (0, action.chunk, depth) if action.kind == "F" else (2, -action.chunk, -depth)


def message_gaps(plan: Plan, rank: int, depths: Depths = (), *sums: Sum) -> list[Gap]:
    """A rank's messages and sums, two lists an action and one behind the last: those up to what
    crosses before the action, and those between that and the action; see `timetable`."""
    depth_of, gaps, gap = dict(depths), list[Gap](), Gap()
    before: Phase | None = None
    for entry in timetable(plan, depths, rank, *sums):
        if isinstance(entry, StageMessage | Sum):
            gap.append(entry)
        else:
            now = phase(entry[1], depth_of)
            stays = now == (before or now)
            num = sum(stays or phase(each.made_by, depth_of) < now for each in gap)
            gaps += [gap[:num], gap[num:]]
            gap, before = [], now
    return [*gaps, gap]
