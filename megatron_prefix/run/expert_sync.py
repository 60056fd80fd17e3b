"""Ranks that share experts tell one another their segments, and refuse programs that differ.

Every rank then computes the same joint plan (plan/joint_forest.py), so nothing else travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_prefix.errors import refused
from megatron_prefix.plan.joint_forest import JointForest, joint_forest
from megatron_prefix.refusals.table import ALLGATHERED_TOKENS, DIFFERENT_PROGRAMS
from megatron_prefix.tree import Forest


def meet(forest: Forest, microbatch_of: Sequence[int], group: Any) -> JointForest:
    """Tells the ranks of a group one another's segments; every rank of the group calls this.

    Args:
        forest: this rank's segments.
        microbatch_of: the trainer's microbatch of each of its rollouts.
        group: the process group whose ranks meet in every action; None or one rank: nobody meets.
    """
    size = group.size() if group is not None else 1
    numbers: list[Any] = [(tuple(microbatch_of), forest.to_ints())]
    if size > 1:
        numbers *= size
        dist.all_gather_object(numbers, numbers[0], group=group)
    return joint_forest(
        [Forest.from_ints(ints) for _, ints in numbers],
        [microbatch_of for microbatch_of, _ in numbers],
        group.rank() if size > 1 else 0,
    )


def expert_group(groups: ProcessGroupCollection) -> Any:
    """Ranks that share experts; a trainer's own collection of groups need not have them."""
    found = getattr(groups, "ep", None)
    return found or parallel_state.get_expert_model_parallel_group(check_initialized=False)


def check(unplanned: Sequence[Any] | None, group: Any) -> None:
    """Refuses a step in which ranks of a group would wait for ever.

    Args:
        unplanned: this rank's actions where a joint plan did not make them; None where one did.
        group: see `meet`; every rank of it calls this.

    Raises:
        UserError: the ranks would not run the same side by side; on every rank of the group.
    """
    if unplanned is None or group is None or group.size() == 1:
        return
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, [str(action) for action in unplanned], group=group)
    if any(other != found[0] for other in found):
        sizes = ", ".join(str(len(other)) for other in found)
        raise refused(DIFFERENT_PROGRAMS, sizes)


def check_dispatcher(config: Any, joint: JointForest) -> None:
    """Refuses what would hang: the all-gather of tokens wants equally many on every rank.

    Raises:
        UserError: segments side by side differ in length; on every rank that has one of them.
    """
    if config.moe_token_dispatcher_type == "allgather" and not joint.even:
        raise refused(ALLGATHERED_TOKENS)
