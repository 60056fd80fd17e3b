"""One order of all actions and messages of a pipeline, kept by every rank.  Pure.

On a GPU a message is two kernels, one at each end, and neither ends before both have begun. A
waiting kernel may hold up everything that its device gets after it: when streams share one queue to
the device (CUDA_DEVICE_MAX_CONNECTIONS=1, which trainers set) and two messages of a link follow one
another; when a kernel is loaded at its first use, which may wait for all running kernels; when
launches block. So the worst is assumed: a rank does one thing after another, and a message ends
when both its ends have reached it.

Ranks that keep to one order cannot wait in a circle even then. Of all that has not happened yet,
take the first in the order: every rank it concerns has done everything before it, so it can happen.
(NCCL's user guide, "Using multiple NCCL communicators concurrently", also asks for one order.)

The order is that of a simulated run: an action at the time it begins, a message at the time the
action that makes it ends. So a send is issued right after its action and a receive before it is
needed. Where streams are independent, only the action that uses a message waits for it.

Where prompts cross data-parallel ranks, pipelines with other segments wait for one another, stage
by stage. So the order has *phases*, the same ones in all pipelines: forward the levels of the
trees, model chunk by model chunk, then what ranks run for themselves, then the levels backward. A
level crosses between two phases, on all stages: everything of a phase comes before it, on every
rank, and nothing of a later one. A receive for the next phase waits until the level has crossed.
(lab/plans/joint_judge.py plays it.)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.simulator import Event, simulate


class StageMessage(NamedTuple):
    """What a stage sends to its neighbour.

    Attributes:
        sender, receiver: pipeline ranks.
        made_by: the sender's action that makes it.
        used_by: the receiver's action that needs it.
    """

    sender: int
    receiver: int
    made_by: Action
    used_by: Action


Levels = tuple[tuple[int, int], ...]
"""Segments that cross data-parallel ranks, each with its level; see tree.forest.Exchange."""

_OWN = (1, 0, 0)
"""The phase of what ranks run for themselves."""


@functools.lru_cache(maxsize=4)
def timetable(plan: Plan, levels: Levels = ()) -> tuple[Event | StageMessage, ...]:
    """The order of all actions and messages; the same on every rank for the same arguments.

    Args:
        plan: any plan that can run.
        levels: of what crosses; the plan is one of `planner.with_crossing`.

    Raises:
        PlanError: the plan cannot run.
    """
    entries: list[tuple[tuple[int, int, int], float, int, Event | StageMessage]] = []
    level_of = dict(levels)
    for event in simulate(plan).events:
        clock = phase(event.action, level_of)
        entries.append((clock, event.start, 1, event))
        message = _message(plan, event)
        if message is not None:
            entries.append((clock, event.end, 0, message))  # before the actions that begin then
    entries.sort(key=lambda entry: entry[:3])  # a stable sort, so ties are in one order, too
    return tuple(entry for *_, entry in entries)


def phase(action: Action, level_of: Mapping[int, int]) -> tuple[int, int, int]:
    """The phase of an action, and of the message that it makes; later ones are larger."""
    level = level_of.get(action.segment)
    if level is None:
        return _OWN
    return (0, action.chunk, level) if action.kind == "F" else (2, -action.chunk, -level)


class Gap(NamedTuple):
    """A rank's messages between two of its actions.

    Attributes:
        before: issued right after the previous action: those of phases before the next action's.
        after: the others, issued after the level that crosses in between.
    """

    before: tuple[StageMessage, ...]
    after: tuple[StageMessage, ...] = ()


def message_gaps(plan: Plan, rank: int, levels: Levels = ()) -> list[Gap]:
    """A rank's messages: those before its first action, between it and the next, and so on.

    Args:
        plan, levels: see `timetable`.
        rank: pipeline rank.
    """
    gaps: list[list[StageMessage]] = [[]]
    for entry in timetable(plan, levels):
        if isinstance(entry, Event):
            if entry.rank == rank:
                gaps.append([])
        elif rank in (entry.sender, entry.receiver):
            gaps[-1].append(entry)
    level_of = dict(levels)
    phases = [phase(action, level_of) for action in plan.programs[rank]]
    first, last = phases[:1] or [_OWN], phases[-1:] or [_OWN]
    bounds = itertools.pairwise([*first, *phases, *last])
    return [_gap(gap, level_of, *pair) for gap, pair in zip(gaps, bounds, strict=True)]


def _gap(
    messages: Sequence[StageMessage],
    level_of: Mapping[int, int],
    before: tuple[int, int, int],
    after: tuple[int, int, int],
) -> Gap:
    """Messages between actions of two phases."""
    early = (message for message in messages if phase(message.made_by, level_of) < after)
    num = len(messages) if before == after else len([*early])
    return Gap(tuple(messages[:num]), tuple(messages[num:]))


def _message(plan: Plan, event: Event) -> StageMessage | None:
    """The message that an action makes, if any."""
    if plan.segments[event.action.segment].source >= 0:
        return None
    step = 1 if event.action.kind == "F" else -1
    stage = plan.stage(event.rank, event.action.chunk) + step
    if not 0 <= stage < plan.num_stages:
        return None
    used_by = event.action._replace(chunk=stage // plan.num_ranks)
    return StageMessage(event.rank, stage % plan.num_ranks, event.action, used_by)
