"""What ranks tell one another about a step before it runs, so that none waits for ever.

They end or fall back together: what one of them cannot do, none does. Those that share experts tell
one another their segments, so that each computes the same joint plan (plan/joint_forest.py), and
refuse programs that differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_prefix.errors import CannotShare, StepFailed, refused
from megatron_prefix.plan.gate import Decision
from megatron_prefix.plan.joint_forest import JointForest, joint_forest
from megatron_prefix.refusals.table import DIFFERENT_PROGRAMS, UNEVEN_MICROBATCHES
from megatron_prefix.tree import Forest

MOST_HOSTS = 8
"""Hosts, or ranks, that a message lists."""
hosts: tuple[str, ...] = ()
"""By rank, where they are known: then an error can name the one that is gone."""
_FINE, _CANNOT_SHARE, _FAILED = range(3)
T = TypeVar("T")


def named(rank: int) -> str:
    """`rank 3 on node-b`, or `rank 3` where hosts are not known."""
    return f"rank {rank} on {hosts[rank]}" if hosts else f"rank {rank}"


@contextlib.contextmanager
def naming(what: str, rank: int) -> Iterator[None]:
    """Says in an error of communication what this rank was doing, and whose log says why."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what}: {error}. A neighbour has failed, hangs, or needs longer than"
            f" --message-timeout-minutes; the log of {named(rank)} says why"
        ) from error


def tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What some work returns, or what it raises: other ranks wait to hear of that."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  # whatever it is
        return None, error


def all_say(value: Any, group: Any) -> list[Any]:
    """What every rank of a group says; all of them call this. The values can be pickled."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def share_together(decision: Decision, group: Any, device: torch.device, why: str) -> Decision:
    """The stock schedule on every rank of a group if one of them takes it.

    Args:
        why: why the ranks cannot differ, for the reason of those that give in.
    """
    if all_agree(decision.share, group, device) or not decision.share:
        return decision
    reason = f"another data-parallel rank takes the stock schedule, and {why}"
    return replace(decision, share=False, fallback=True, reason=reason)


def worst(
    numbers: Sequence[float],
    problem: BaseException | None,
    groups: Sequence[Any],
    device: torch.device,
) -> tuple[list[float], str]:
    """What is the worst on any rank of a grid of groups; every rank of them calls this.

    Args:
        numbers: of this rank, as many on all of them; not looked at where there is a problem.

    Returns:
        The largest of each number; and what a rank says of its problem, "" if none has one.
    """
    failed = problem is not None
    local = [0.0] * len(numbers) if failed else numbers
    values = torch.tensor([float(failed), *local], dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    any_failed, *largest = values.tolist()
    return largest, str(_first_reason(problem, groups)) if any_failed else ""


def all_agree(holds: bool, group: Any, device: torch.device) -> bool:
    """Whether something holds on all ranks of a group; without a group, on this one."""
    if group is None:
        return holds
    flag = torch.tensor([int(holds)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


def first_says(value: Any, groups: Sequence[Any]) -> Any:
    """The value of the first rank of a grid of groups, on all ranks; every rank calls this."""
    for group in groups:
        value = all_say(value, group)[0]
    return value


def agree(
    problem: BaseException | None, groups: Sequence[Any], device: torch.device
) -> CannotShare | None:
    """What `agree_on` says of a problem."""
    return agree_on(problem, False, groups, device)[0]


def agree_on(
    problem: BaseException | None, wish: bool, groups: Sequence[Any], device: torch.device
) -> tuple[CannotShare | None, bool]:
    """Tells all ranks of a grid of groups what has happened; every rank of them calls this.

    Args:
        groups: see `Rank.companions`; after the last of them every rank has heard of all.

    Returns:
        Why no rank can share in this step, or None; and whether all ranks have the wish.

    Raises:
        StepFailed: another rank has failed. A rank's own failure is raised as it is.
    """
    level = _FINE if problem is None else _FAILED
    if isinstance(problem, CannotShare):
        level = _CANNOT_SHARE
    highest, against = level, int(not wish)
    if groups:  # a tensor from the host waits for all that the device has to do
        worst = torch.tensor([level, against], device=device)
        for group in groups:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        highest, against = worst.tolist()
    if highest == _FINE:
        return None, not against
    reason: Any = _first_reason(problem if level == highest else None, groups)
    if highest == _CANNOT_SHARE:
        return (problem if isinstance(problem, CannotShare) else reason), False
    if problem is not None and level == _FAILED:
        raise problem
    raise StepFailed(f"the step ends on all ranks: {reason}")


def _first_reason(problem: BaseException | None, groups: Sequence[Any]) -> CannotShare | str:
    reason: CannotShare | str = ""
    if isinstance(problem, CannotShare):
        reason = problem  # with its refusal
    elif problem is not None:
        rank = dist.get_rank() if groups else 0
        reason = f"rank {rank}: {type(problem).__name__}: {problem}"
    for group in groups:
        reason = next((text for text in all_say(reason, group) if text), "")
    return reason


def meet(
    forest: Forest, microbatch_of: Sequence[int], group: Any, *, even: bool = False
) -> JointForest:
    """A rank's segments beside those of ranks that share experts; all of these call this."""
    if group is None:
        return JointForest.alone(forest, microbatch_of)
    forests, owners = zip(*all_say((forest, tuple(microbatch_of)), group), strict=True)
    return joint_forest(forests, owners, group.rank(), even=even)


def check_counts(num_microbatches: int, group: Any, device: torch.device) -> None:
    """Refuses data-parallel ranks with different numbers of microbatches, whose routers balance the
    global batch; all ranks call this.

    Raises:
        UserError: on every rank of the group.
    """
    bounds = torch.tensor([num_microbatches, -num_microbatches], device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=group)
    fewest, most = bounds.tolist()
    if fewest != -most:
        raise refused(UNEVEN_MICROBATCHES, fewest, -most)


def check_programs(unplanned: Sequence[Any] | None, group: Any) -> None:
    """Refuses a step in which ranks of a group would wait for ever.

    Args:
        unplanned: this rank's actions where a joint plan did not make them; None if one did.

    Raises:
        UserError: the ranks would not run the same side by side; on every rank of the group.
    """
    if unplanned is None:
        return
    programs = all_say([str(action) for action in unplanned], group)
    if any(program != programs[0] for program in programs):
        sizes = ", ".join(str(len(program)) for program in programs)
        raise refused(DIFFERENT_PROGRAMS, sizes)
