"""Ranks that end or fall back together: what one of them cannot do, none does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_prefix.errors import CannotShare, StepFailed
from megatron_prefix.plan.gate import Decision

_FINE, _CANNOT_SHARE, _FAILED = range(3)


def companions(groups: Any) -> list[Any]:
    """Process groups whose grid holds all ranks that take part in a step."""
    data = getattr(groups, "dp_cp", None) or groups.cp  # a trainer's collection may lack the first
    return [group for group in (groups.tp, groups.pp, data) if group.size() > 1]


def share_together(decision: Decision, group: Any, device: torch.device, why: str) -> Decision:
    """The stock schedule on every rank of a group, where one of them takes it.

    Args:
        decision: this rank's; every rank of the group calls this.
        group: a process group.
        device: where its tensors live.
        why: why the ranks cannot differ, for the reason of those that give in.
    """
    share = torch.tensor([int(decision.share)], device=device)
    dist.all_reduce(share, dist.ReduceOp.MIN, group=group)
    if not decision.share or int(share):
        return decision
    reason = f"another data-parallel rank takes the stock schedule, and {why}"
    return replace(decision, share=False, fallback=True, reason=reason)


def all_agree(mine: bool, group: Any, device: torch.device) -> bool:
    """Whether something holds on all ranks of a group; None or one rank: on this one."""
    if group is None or group.size() == 1:
        return mine
    flag = torch.tensor([int(mine)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


def first_says(value: Any, groups: Sequence[Any]) -> Any:
    """The value of the first rank of a grid of groups, on all ranks; every rank calls this.

    Args:
        value: of this rank; it can be pickled.
        groups: see `companions`.
    """
    for group in groups:
        heard: list[Any] = [None] * group.size()
        dist.all_gather_object(heard, value, group=group)
        value = heard[0]
    return value


def agree(
    problem: BaseException | None, groups: Sequence[Any], device: torch.device
) -> CannotShare | None:
    """Tells all ranks of a grid of groups what has happened; every rank of them calls this.

    Args:
        problem: of this rank.
        groups: see `companions`; after the last of a grid's groups every rank has heard of all.
        device: where their tensors live.

    Returns:
        Why no rank can share in this step, or None.

    Raises:
        StepFailed: another rank has failed. A rank's own failure is raised as it is.
    """
    level = _FINE if problem is None else _FAILED
    if isinstance(problem, CannotShare):
        level = _CANNOT_SHARE
    found = level
    if groups:  # a tensor from the host waits for all that the device has to do
        worst = torch.tensor([level], device=device)
        for group in groups:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        found = int(worst)
    if found == _FINE:
        return None
    reason: Any = _first_reason(problem if level == found else None, groups)
    if found == _CANNOT_SHARE:
        return problem if isinstance(problem, CannotShare) else reason
    if problem is not None and level == _FAILED:
        raise problem
    raise StepFailed(f"the step ends on all ranks: {reason}")


def _first_reason(problem: BaseException | None, groups: Sequence[Any]) -> CannotShare | str:
    """What a rank that has a problem says of it, on all ranks; only after something went wrong."""
    mine: CannotShare | str = ""
    if isinstance(problem, CannotShare):
        mine = problem  # with its refusal
    elif problem is not None:
        rank = dist.get_rank() if groups else 0
        mine = f"rank {rank}: {type(problem).__name__}: {problem}"
    for group in groups:
        heard: list[Any] = [None] * group.size()
        dist.all_gather_object(heard, mine, group=group)
        mine = next((said for said in heard if said), "")
    return mine
