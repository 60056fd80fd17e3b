"""Device memory of one schedule: what a step keeps, and where, so that it fits."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.device.memory import free_bytes
from megatron_prefix.errors import StepOutOfMemory
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.memory import MemoryModel, RankMemory, memory_table
from megatron_prefix.plan.memory_policy import Rates, automatic, leaner
from megatron_prefix.plan.prediction import heaviest_stock_plan, limit_of
from megatron_prefix.run.execute.rewind import Rewind
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.request import Request
from megatron_prefix.tree import Place, Segment, Span

STEPS_ASKED, STEPS_BETWEEN = 3, 50
"""Training steps, first of all and later on, in which all ranks say how much memory is free. The
optimizer's state is there from the second one on; other things may come later."""

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class MemoryControl:
    """Device memory of one schedule.

    Attributes:
        gathers: whether every context-parallel rank keeps K/V of all, in the step that runs.
        before: how the step that runs has begun; None outside of steps.
        limit: bytes besides weights and gradients that the last planned step may take on a rank;
            infinite while nothing is known of that.
    """

    def __init__(self, config: PrefixConfig) -> None:
        self._config, self._budget = config, config.memory_budget
        self.gathers = False
        self._free: list[float] = []
        self._settled = 0
        self._known: dict[Any, tuple[float, Rates]] = {}
        self._static, self._rates = 0.0, Rates(1.0, 1.0)
        self.limit = math.inf
        self.before: Rewind | None = None
        self._resting = 0

    def end(self) -> None:
        self.before = None

    def settle(self, plan: Plan, joint: JointForest, request: Request) -> None:
        """Decides where K/V are with context parallelism, alike on all ranks that make this step
        together: those of the pipeline and those that share experts; all of them call this.

        What is free is asked in a few training steps only, as to ask means to wait for the device;
        until one has been made, every rank keeps its own K/V.
        """
        rank = request.rank
        has_cp, cp_reduce = rank.groups.cp.size() > 1, self._config.cp_reduce
        self.gathers = has_cp and cp_reduce == "segment"
        if not has_cp or cp_reduce != "auto":
            return
        if not rank.forward_only:
            if self._settled < STEPS_ASKED or self._settled % STEPS_BETWEEN == 0:
                self._free = [*self._free, self._least_of(rank.same_schedule, rank)][-STEPS_ASKED:]
            self._settled += 1
        costs = request.costs
        if self._free and (costs.is_known or not costs.counts):
            longest = replace(plan, segments=longest_segments(joint))
            peaks = self._footprint(request, gathers=True).peaks(longest)
            self.gathers = max(memory.peak for memory in peaks) <= min(*self._free, self.limit)

    def ask_once(self, request: Request) -> None:
        """Asks what weights and their gradients take on the stage with the least, and how fast the
        slowest rank is, where something may be offloaded; all ranks that meet call this."""
        rank = request.rank
        if rank.layout not in self._known:
            stages = [rank.groups.pp] if rank.num_stages > 1 else []
            static = _least([rank.static_bytes], stages, rank.device)[0]
            self._known[rank.layout] = static, self._slowest(request)
        self._static, self._rates = self._known[rank.layout]

    def _slowest(self, request: Request) -> Rates:
        every = (part.rates() for part in request.parts)
        measured = next(filter(None, every), None)
        if measured is None:
            return Rates(1.0, 1.0)  # all stays on the device, so only their ratio would matter
        numbers = _least([measured.flops, measured.link], request.rank.waiting, request.rank.device)
        return Rates(*map(_rounded, numbers))

    def limited(
        self, plan: Plan, joint: JointForest, request: Request, least: float = 0.0
    ) -> tuple[Plan, float]:
        """The plan with policies that keep the limit, by memory "auto", and the peak of the rank
        with most, in bytes; sets `limit`.

        Without a budget the limit is the peak of Megatron's own schedule on the same
        microbatches, with the user's own recomputation, and a little more. All ranks that make a
        step together come to the same answer. While nothing is known, all inner segments run again,
        if the device counts bytes, so that more is known behind the step; else nothing does.

        Args:
            plan: of the step, on segments as long as on the longest rank.
            joint: the step, of all ranks that share experts.
            least: of the limit, where it is known to be that of a rank that is not in `joint`.
        """
        rank, costs = request.rank, request.costs
        is_free = self._config.memory == "auto" and not self._config.plan_file
        if not costs.is_known:
            self.limit = math.inf if self._budget is None else self._budget
            return (leaner(plan) if is_free and costs.counts else None) or plan, 0.0
        limit = self._budget
        if limit is None:
            limit = limit_of(max(self._stock_peaks(joint, request)), self._static)
        self.limit = max(least, limit)
        # Before it is known whether a rank keeps K/V of all: only if the user says so.
        footprint = self._footprint(request, gathers=self._config.cp_reduce == "segment")
        if is_free:
            may_offload = any(part.may_offload for part in request.parts)
            policies = automatic(
                plan, footprint, rank.model.cost, self._rates, self.limit / costs.overhead,
                may_offload,
            )  # fmt: skip
            plan = replace(plan, policies=policies)
        return plan, costs.overhead * max(memory.peak for memory in footprint.peaks(plan))

    def _stock_peaks(self, joint: JointForest, request: Request) -> list[float]:
        """What Megatron's schedule takes on each stage, besides weights and gradients."""
        rank = request.rank
        plan = heaviest_stock_plan(
            joint.union, joint.microbatches_of, rank.num_stages, len(rank.models)
        )
        footprint = request.costs.footprint(rank, gathers=False, stock=True)
        return [memory.peak for memory in footprint.peaks(plan)]

    def _footprint(self, request: Request, gathers: bool | None = None) -> MemoryModel:
        """Bytes of the model on a rank, in the step that runs unless `gathers` is given."""
        gathers = self.gathers if gathers is None else gathers
        return request.footprint(gathers=gathers)

    def _least_of(self, groups: Sequence[Any], rank: Rank) -> float:
        free = [float(free_bytes(rank.device, self._budget))]
        return _rounded(_least(free, groups, rank.device)[0])

    def predicted(self, plan: Plan, request: Request) -> RankMemory:
        return self._footprint(request).peaks(plan)[request.rank.stage]

    def give_back(self, used: int, reserved: int, device: torch.device) -> None:
        """In mode "auto" returns to the device the blocks that torch's allocator has cached in a
        step with gradients, where they are more than the stock schedule would have left: what other
        phases run besides this process's allocator (an inference engine) finds the same room. Where
        the trainer had reserved as much before, nothing is returned, as that takes time, nor within
        `STEPS_BETWEEN` steps: what a step needs again it would have to ask the device for.

        Args:
            used, reserved: bytes of the allocator when the step began.
        """
        if self._config.mode != "auto":
            return
        self._resting -= 1
        if self._resting > 0:
            return
        if torch.cuda.memory_reserved(device) > max(reserved, used + self.limit):
            logger.info(
                "torch caches more memory than the step's limit: it is returned to the device"
            )
            torch.cuda.empty_cache()
            self._resting = STEPS_BETWEEN

    def run(
        self,
        attempt: Callable[[Plan], Result],
        plan: Plan,
        request: Request,
        why_final: Callable[[], str],
        *,
        is_alone: bool,
    ) -> tuple[Result, Plan]:
        """Runs a step; if memory runs out, undoes it and runs it once more, with every inner
        segment recomputed.

        That takes a rank that no other waits for: where others wait for it in a collective it
        cannot go back alone, and to ask them first would cost every step a collective. Then the
        step ends with an error, and so do the other ranks, which lose a neighbour.

        Args:
            attempt: runs a plan, and leaves nothing behind when it fails.
            why_final: asked when memory has run out; why the step cannot run again, else empty.
            is_alone: whether no other rank waits for this one in the middle of a step.

        Returns:
            What `attempt` returned, and the plan that it ran.

        Raises:
            StepOutOfMemory: the step does not fit.
        """
        if self.before is not None:
            self.before.looked()
        try:
            return attempt(plan), plan
        except torch.OutOfMemoryError as error:
            reason = _first_sentence(error)
        # The frames of the failed step, and all tensors in them, are gone by now.
        free_memory()
        lean = None if request.rank.forward_only else leaner(plan)
        if self._config.memory == "recompute" or self.before is None or not is_alone:
            lean = None
        if lean is None:
            why = "nothing leaner is left" if is_alone else "other ranks wait in this step"
        else:
            why = why_final() or self._why_not_undone()
        if lean is None or why:
            raise self._failure(f"{reason}; not tried again: {why}", plan, request)
        self.before.undo()  # type: ignore[union-attr]
        free_memory()
        logger.warning("%s: running the step again with every inner segment recomputed", reason)
        try:
            return attempt(lean), lean
        except torch.OutOfMemoryError as error:
            reason = _first_sentence(error)
        free_memory()
        raise self._failure(f"{reason}; with all inner segments recomputed, too", lean, request)

    def _why_not_undone(self) -> str:
        if self.before is None or self.before.possible():
            return ""
        return "gradients were not zero when the step began"

    def _failure(self, reason: str, plan: Plan, request: Request) -> StepOutOfMemory:
        rows = memory_table(plan, self._footprint(request).peaks(plan))
        keeps = "cp_reduce 'wave', " if self.gathers else ""
        logger.error("predicted memory on top of weights and gradients, GiB:\n%s", rows)
        return StepOutOfMemory(
            f"{reason}. Give {keeps}fewer segment_tokens, chunk_tokens, Megatron's"
            f" recompute_granularity, or more ranks\n{rows}"
        )


def free_memory() -> None:
    """Returns what is no longer used to the device; models and their hooks refer to one another.

    Twice: what a suspended generator holds goes only after it has been closed.
    """
    gc.collect()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _first_sentence(error: BaseException) -> str:
    return "out of device memory: " + str(error).partition(". ")[0]


def _least(numbers: list[float], groups: Sequence[Any], device: torch.device) -> list[float]:
    """The smallest of each number over ranks that meet; every rank of the groups calls this."""
    if not groups:
        return numbers
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    for group in groups:  # of a grid: after the last one it is the smallest of all of them
        dist.all_reduce(values, dist.ReduceOp.MIN, group=group)
    return values.tolist()


def _rounded(number: float) -> float:
    """Down to six binary digits, so that choices do not change with every byte."""
    if number <= 0:
        return 0.0
    mantissa, exponent = math.frexp(number)
    return math.ldexp(math.floor(mantissa * 64) / 64, exponent)


def longest_segments(joint: JointForest) -> tuple[Segment, ...]:
    """As long as on the rank that has most rows, place by place, in as many spans as on the rank
    that has most, all of them below the last parent."""
    if joint.num_pipelines == 1:
        return joint.forest.segments
    segments, align = [], max(1, joint.forest.multiple)
    places = zip(joint.union.segments, joint.most, strict=True)
    for index, (segment, (num, most)) in enumerate(places):
        parents = segment.parents
        parent = Place(parents[-1], 0) if parents else None
        num_below = max(0, min(most, num // align) - 1)  # a span is not shorter than the alignment
        below = Place(index, 0) if segment.joined >= 0 else parent
        rollouts = segment.spans[0].rollouts
        first = num - num_below * align
        spans = (
            Span(0, first, first, rollouts, parent),
            *[Span(0, align, align, rollouts, below)] * num_below,
        )
        trained = min(num, segment.num_read)
        segments.append(segment._replace(spans=spans, trained=trained))
    return tuple(segments)
