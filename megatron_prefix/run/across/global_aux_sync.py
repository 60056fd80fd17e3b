"""What data-parallel ranks owe each other when routers balance the global batch.

Their backwards then wait for counts of all of them (moe/group_counts.py), so they take one
schedule, and no plan may have a backward wait for what it counts later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_prefix.errors import UserError, refused
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.count_sums import progress
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.refusals.table import UNEVEN_MICROBATCHES


def check_counts(num_microbatches: int, group: Any, device: torch.device) -> None:
    """Refuses data-parallel ranks with different numbers of microbatches; all ranks call this.

    Args:
        num_microbatches: of the trainer on this rank.
        group: the data-parallel process group, context parallelism included.
        device: where its tensors live.

    Raises:
        UserError: on every rank of the group.
    """
    mine = torch.tensor([num_microbatches, -num_microbatches], device=device)
    dist.all_reduce(mine, op=dist.ReduceOp.MIN, group=group)
    fewest, most = mine.tolist()
    if fewest != -most:
        raise refused(UNEVEN_MICROBATCHES, fewest, -most)


def prove(plan: Plan, joint: JointForest, rank: int) -> None:
    """Refuses a plan, a user's own, whose backwards would wait for sums that come after them.

    Ranks that share experts run side by side, so what one of them waits for all must have started.

    Args:
        plan: the step's plan.
        joint: the rank's pipeline, and those it runs joint.
        rank: in the pipeline.

    Raises:
        UserError: naming the action.
    """
    union = replace(plan, segments=joint.union.segments)
    steps = zip(plan.programs[rank], progress(union, rank, joint.union_microbatch_of), strict=True)
    for action, (counted, needed) in steps:
        if counted < needed:
            raise UserError(
                f"rank {rank}: {action} waits for the global_aux_loss of {needed} microbatches"
                f" and the plan has counted {counted} by then: run it later, or give no plan file"
            )
