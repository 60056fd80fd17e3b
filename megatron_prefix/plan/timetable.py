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
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.simulator import Cost, Event, simulate, token_cost


class Message(NamedTuple):
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


@functools.lru_cache(maxsize=4)
def timetable(plan: Plan, cost: Cost = token_cost) -> tuple[Event | Message, ...]:
    """The order of all actions and messages; the same on every rank for the same arguments.

    Args:
        plan: any plan that can run.
        cost: above 0; the closer to the real durations, the less ranks wait for one another.

    Raises:
        PlanError: the plan cannot run.
    """
    entries: list[tuple[float, int, Event | Message]] = []
    for event in simulate(plan, cost=cost).events:
        entries.append((event.start, 1, event))
        message = _message(plan, event)
        if message is not None:
            entries.append((event.end, 0, message))  # before the actions that begin then
    entries.sort(key=lambda entry: entry[:2])  # a stable sort, so ties are in one order, too
    return tuple(entry for _, _, entry in entries)


def exchanges(plan: Plan, rank: int) -> list[list[Message]]:
    """A rank's messages: those before its first action, between it and the next, and so on.

    Args:
        plan: see `timetable`.
        rank: pipeline rank.
    """
    gaps: list[list[Message]] = [[]]
    for entry in timetable(plan):
        if isinstance(entry, Event):
            if entry.rank == rank:
                gaps.append([])
        elif rank in (entry.sender, entry.receiver):
            gaps[-1].append(entry)
    return gaps


def _message(plan: Plan, event: Event) -> Message | None:
    """The message that an action makes, if any."""
    if plan.segments[event.action.segment].source >= 0:
        return None
    step = 1 if event.action.kind == "F" else -1
    stage = plan.stage(event.rank, event.action.chunk) + step
    if not 0 <= stage < plan.num_stages:
        return None
    used_by = event.action._replace(chunk=stage // plan.num_ranks)
    return Message(event.rank, stage % plan.num_ranks, event.action, used_by)
