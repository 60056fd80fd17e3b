"""One step with both schedules: the trainer gets stock's results, and one line says how far ours
were from them.

The prefix schedule runs first, on copies of what is drawn; then everything that it changed is put
back, and Megatron's schedule runs as it would have without us. What a trainer's forward steps do
beside that, such as counting and logging, happens twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_prefix.device.clock import elapsed, now, wait_for
from megatron_prefix.features.verify import judge, logs
from megatron_prefix.features.verify.gradients import KeptGradients
from megatron_prefix.features.verify.outputs import Outputs
from megatron_prefix.features.verify.step_state import StepState
from megatron_prefix.megatron.stock import run_stock
from megatron_prefix.parts import Run
from megatron_prefix.run import agreement
from megatron_prefix.run.agreement import all_say
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.data_iterators import RepeatedIterators
from megatron_prefix.run.report import Reports, StepReport
from megatron_prefix.run.request import Request

logger = logging.getLogger(__name__)
NO_FINALIZE = "gradients are reduced during the backward and finalized after the call"


@dataclass(frozen=True)
class Cost:
    """What a schedule took.

    Attributes:
        seconds: of this rank.
        peak_bytes: the allocator's peak when it had run; None without a GPU.
        is_new: whether that is a new peak of the process.
    """

    seconds: float
    peak_bytes: int | None = None
    is_new: bool = False

    def __str__(self) -> str:
        if self.peak_bytes is None:
            return f"{self.seconds:.2f} s"
        bound = "" if self.is_new else "at most "
        return f"{self.seconds:.2f} s and {bound}{self.peak_bytes / (1 << 30):.1f} GiB"


@dataclass(frozen=True)
class Verification:
    """A step that both schedules ran.

    Attributes:
        worst: by kind the largest difference on all ranks, in units of what rounding allows.
        failure: what is outside; "" if the schedules agree.
        prefix, stock: what they took on this rank.
    """

    worst: dict[str, judge.Worst]
    failure: str
    prefix: Cost
    stock: Cost


@dataclass(frozen=True)
class Outcome:
    """What `run_both` found.

    Attributes:
        store: what the trainer gets.
        verification: None if the step was not compared.
        problem: why no step of this kind can be compared; "" if they can.
    """

    store: list[Any]
    verification: Verification | None = None
    problem: str = ""


def run_both(run: Run, request: Request, reports: Reports) -> Outcome:
    """Runs the prefix schedule, and where any rank has shared something the stock one as well.

    All ranks that make a step together call this; see `Request.agreeing`.

    Args:
        run: the prefix schedule.
        request: the call.
        reports: of the schedule's steps.
    """
    rank, arguments = request.rank, request.arguments
    if why := _obstacle(rank):
        return Outcome(run(request), problem=why)
    iterators = RepeatedIterators(arguments["data_iterator"], copies=True)
    state = StepState(rank, arguments["forward_step_func"])
    before = logs.buffers(rank)
    ours = _Side(rank)
    ours.run(
        lambda: run(replace(request, arguments={**arguments, "data_iterator": iterators.first}))
    )
    report: Any = reports.last
    (shares,), problem = agreement.worst(
        [float(report.decision.share)], _Problem(iterators.problem) if iterators.problem else None,
        request.agreeing, rank.device,
    )  # fmt: skip
    if problem or not shares:
        return Outcome(ours.store, problem=iterators.problem or problem)
    limits = judge.Limits(rank, report.forest.raw_tokens, arguments["num_microbatches"])
    saved = None if rank.forward_only else KeptGradients(rank, by_norm=limits.is_coarse)
    state.restore()
    stock = _Side(rank)
    stock.run(lambda: run_stock(arguments, data_iterator=iterators.again()))
    distances = {
        "losses": limits.of(logs.stores(ours.store, stock.store, limits.least_loss)),
        "outputs": limits.of(ours.outputs.distance(stock.outputs)),
        "gradients": None if saved is None else limits.of_gradients(saved.differences()),
        "auxiliary losses": limits.of_logged(logs.distance(ours.logged, stock.logged)),
        "expert biases": limits.of(logs.moved(ours.buffers, stock.buffers, before)),
    }
    compared = {kind: worst for kind, worst in distances.items() if worst is not None}
    worst_of_kind = _worst_anywhere(compared, request)
    failure = judge.failure(worst_of_kind)
    return Outcome(stock.store, Verification(worst_of_kind, failure, ours.cost, stock.cost))


def tell_verified(
    report: StepReport, result: Verification, request: Request, number: int, num_steps: int
) -> None:
    """Logs on the first rank how far a step was from the stock schedule's.

    As a warning: many a trainer hides other lines of a package that it does not know.

    Args:
        report: of the step.
        result: of the comparison.
        request: the call.
        number, num_steps: which step of its kind that is compared it was, and of how many.
    """
    if any(group.rank() for group in request.agreeing):
        return
    named = "pass without gradients" if request.rank.forward_only else "update"
    verdict = f"DIFFERENT ({result.failure})" if result.failure else "equal within rounding"
    logger.warning(
        "verify, %s %d of %d: the prefix schedule and the stock schedule are %s. Largest"
        " differences, as a fraction of what rounding allows: %s. Tokens computed on this rank: %s"
        " of %s. Prefix schedule %s, stock schedule %s. The trainer got the stock schedule's"
        " results.",
        named, number, num_steps, verdict, judge.described(result.worst),
        f"{report.forest.executed_tokens:,}", f"{report.forest.raw_tokens:,}",
        result.prefix, result.stock,
    )  # fmt: skip


def tell_unverified(problem: str, request: Request) -> None:
    """Logs on the first rank why steps of a kind cannot be compared; they are shared unverified."""
    if not any(group.rank() for group in request.agreeing):
        logger.warning("verify: steps of this kind cannot be compared: %s", problem)


class _Problem(Exception):
    """Why the same cannot be drawn again, told to other ranks."""


class _Side:
    """One schedule's run, and what it left beside gradients."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.outputs = Outputs(rank)

    def run(self, schedule: Callable[[], list[Any]]) -> None:
        device = self._rank.device
        peak = _peak(device)
        wait_for(device)
        begin = now(device)
        with self.outputs.seen():
            self.store = schedule()
        end = now(device)
        wait_for(device)
        after = _peak(device)
        self.cost = Cost(elapsed(begin, end), after, after != peak)
        self.logged = logs.auxiliary(self._rank)
        self.buffers = logs.buffers(self._rank)


def _obstacle(rank: Rank) -> str:
    """Why calls on a rank cannot be compared; "" if they can. The same on all ranks."""
    unfinished = rank.overlaps and rank.config.finalize_model_grads_func is None
    return NO_FINALIZE if unfinished and not rank.forward_only else ""


def _peak(device: torch.device) -> int | None:
    """Bytes; the counter is the trainer's and is not reset."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _worst_anywhere(compared: dict[str, judge.Worst], request: Request) -> dict[str, judge.Worst]:
    """The largest differences on all ranks that make a step together; all of them call this."""
    for group in request.agreeing:
        of_ranks = all_say(compared, group)
        kinds = {kind for of_rank in of_ranks for kind in of_rank}
        compared = {
            kind: max(of_rank[kind] for of_rank in of_ranks if kind in of_rank) for kind in kinds
        }
    return compared
