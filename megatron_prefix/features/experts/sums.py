"""When sums of routers' counts over data-parallel ranks begin in a plan.  Pure.

group_counts.py says what they are and why waiting for them ends.  A sum is a kernel of a stream
of its own, and on a device with one queue (CUDA_DEVICE_MAX_CONNECTIONS=1) one behind another that
has not ended holds up everything.  So a sum begins early only if no other is under way that no
backward of the last rank has waited for; the rest begin right before the backward there that waits
for them.  On other ranks they begin in that place of the plan's order (plan/timetable.py).  Ranks
that share experts begin a sum behind the same action, when all of them have counted what it sums:
plan and microbatches are those of all these ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from megatron_prefix.errors import UserError
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.timetable import Sum


def progress(plan: Plan, rank: int, microbatch_of: Sequence[int]) -> list[tuple[int, int]]:
    """Per action of a pipeline rank: how many microbatches, from the first on, all forwards before
    it have counted, and for the sums of how many it waits. `microbatch_of`: of each rollout."""
    through = [segment.microbatches(microbatch_of) for segment in plan.segments]
    missing = [0] * (max(microbatch_of, default=-1) + 1)
    for microbatch in itertools.chain.from_iterable(through):
        missing[microbatch] += plan.num_chunks
    steps, done = [], 0
    for kind, index, *_ in plan.programs[rank]:
        steps.append((done, 1 + max(through[index], default=-1) if kind == "B" else 0))
        for microbatch in through[index] if kind == "F" else ():
            missing[microbatch] -= 1
        while done < len(missing) and not missing[done]:
            done += 1
    return steps


def prove(plan: Plan, microbatch_of: Sequence[int]) -> None:
    """Refuses a plan, a user's own, whose backwards would wait for sums that come after them.

    Raises:
        UserError: naming the action.
    """
    rank = plan.num_ranks - 1
    steps = progress(plan, rank, microbatch_of)
    for action, (counted, needed) in zip(plan.programs[rank], steps, strict=True):
        if counted < needed:
            raise UserError(
                f"rank {rank}: {action} waits for the global_aux_loss of {needed} microbatches"
                f" and the plan has counted {counted} by then: run it later, or give no plan file"
            )


def sums_of(plan: Plan, microbatch_of: Sequence[int]) -> Iterator[Sum]:
    """Where sums begin in the order of a plan's actions."""
    rank = plan.num_ranks - 1
    steps = itertools.pairwise([*progress(plan, rank, microbatch_of), (0, 0)])
    begun = waited = 0  # waited: sums that an action before has waited for
    for action, (now, (counted, next_needed)) in zip(plan.programs[rank], steps, strict=True):
        before, waited = begun, max(waited, now[1])
        if next_needed > begun:
            begun = max(begun, min(next_needed, counted))
        elif begun == waited and begun < counted:
            begun += 1
        if begun > before:
            yield Sum(action, begun)
