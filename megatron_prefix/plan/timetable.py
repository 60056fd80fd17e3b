"""When messages travel: one order of a pipeline's actions and messages, kept by every rank.  Pure.

On a GPU a message is two kernels, one at each end, and neither ends before both have begun.  A
kernel that waits may hold up whatever its device is given behind it: all of it when streams share
one queue to the device (CUDA_DEVICE_MAX_CONNECTIONS=1, which trainers set) and two messages of a
link follow one another, or when a kernel is loaded at its first use, which may wait for all that
run, or when launches block.  So the worst is assumed: a rank does one thing after another, and a
message ends when both its ends have come to it.

Ranks that keep to one common order cannot wait in a circle even so: of what has not happened yet,
take the first in the order; every rank it concerns has done all that it has before it.  (NCCL's
user guide, "Using multiple NCCL communicators concurrently", asks for one order, too.)

The order is that of the simulated run: an action stands where it begins, a message where the action
that makes it ends.  So a send is issued right behind its action and a receive before it is needed,
and where streams are independent nothing waits for a message but the action that uses it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.simulator import Cost, Event, simulate, token_cost


class Message(NamedTuple):
    """What a stage hands to its neighbour.

    Attributes:
        sender, receiver: pipeline ranks.
        made_by: the sender's action behind which it leaves.
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
        cost: above 0; the nearer to what actions take, the less a rank holds up another.

    Raises:
        PlanError: the plan cannot run.
    """
    entries: list[tuple[float, int, Event | Message]] = []
    for event in simulate(plan, cost=cost).events:
        entries.append((event.start, 1, event))
        message = _message(plan, event)
        if message is not None:
            entries.append((event.end, 0, message))  # before the actions that begin then
    entries.sort(key=lambda entry: entry[:2])  # stable: what is left equal is in one order, too
    return tuple(entry for _, _, entry in entries)


def exchanges(plan: Plan, rank: int, cost: Cost = token_cost) -> list[list[Message]]:
    """A rank's messages: those before its first action, those between it and the next, and so on.

    Args:
        plan: see `timetable`.
        rank: pipeline rank.
        cost: see `timetable`.
    """
    gaps: list[list[Message]] = [[]]
    for entry in timetable(plan, cost):
        if isinstance(entry, Event):
            if entry.rank == rank:
                gaps.append([])
        elif rank in (entry.sender, entry.receiver):
            gaps[-1].append(entry)
    return gaps


def _message(plan: Plan, event: Event) -> Message | None:
    """What an action hands on, if anything."""
    step = 1 if event.action.kind == "F" else -1
    stage = plan.stage(event.rank, event.action.chunk) + step
    if not 0 <= stage < plan.num_stages:
        return None
    used_by = event.action._replace(chunk=stage // plan.num_ranks)
    return Message(event.rank, stage % plan.num_ranks, event.action, used_by)
