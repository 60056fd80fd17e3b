"""Deciding: the segments of a step, its plan, and which schedule runs it.

What is decided is the same on all ranks that must agree; where it takes more than one to know, they
ask one another (run/agreement.py).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import StepFailed, refused
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.gate import Decision, decide, kept_to_limit, unshared, without_sharing
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.prediction import Prediction, predict
from megatron_prefix.plan.step_planner import Find, Forecast, Judge, StepPlanner
from megatron_prefix.refusals.own_errors import softened
from megatron_prefix.refusals.table import SCALES_ORDER
from megatron_prefix.run import agreement
from megatron_prefix.run.costs import guessed
from megatron_prefix.run.execute.losses import are_in_order
from megatron_prefix.run.execute.memory_control import MemoryControl, longest_segments
from megatron_prefix.run.rank import Rank, default_groups
from megatron_prefix.run.read.step import Step
from megatron_prefix.run.report import StepReport
from megatron_prefix.run.request import Request
from megatron_prefix.tree import Forest, Pairs
from megatron_prefix.tree.packing import MicrobatchRows

logger = logging.getLogger(__name__)


class Beside(NamedTuple):
    """What ranks that share experts knew of one another in their last step with gradients.

    Attributes:
        shortest: the least of the segment lengths that they would choose, each alone.
        limit: bytes that the one with most may take besides weights and gradients.
    """

    shortest: int
    limit: float


class Planning:
    """What one schedule decides with: plans that it knows, and what costs say of them."""

    def __init__(self, config: PrefixConfig, memory: MemoryControl) -> None:
        self.config, self._memory = config, memory
        self._planners: dict[Any, StepPlanner] = {}
        self._beside: dict[StepPlanner, Beside] = {}
        self._warned = False

    def planner(self, request: Request) -> StepPlanner:
        rank, model = request.rank, request.rank.model
        turn = rank.config.microbatch_group_size_per_vp_stage
        even = max((part.even for part in request.parts), default=0)
        key = rank.layout, rank.device.type, turn, model.alignment, model.whole, model.joins, even
        if key not in self._planners:
            self._planners[key] = StepPlanner(
                self.config, guessed(rank), model.alignment, rank.num_stages, len(rank.models),
                turn, model.whole, model.joins, even,
            )  # fmt: skip
        return self._planners[key]

    def forget(self) -> None:
        """After a step that could not be planned, perhaps on one rank alone: what ranks chose
        before, which they must remember alike."""
        self._planners.clear()
        self._beside.clear()

    def shares_nothing(self, samples: Sequence[Pairs] | None, rank: Rank) -> bool:
        """Whether a step in mode "auto" is without sharing, for which no tree is built; all ranks
        of a first stage that share experts ask, and all of their steps must be such."""
        unit = rank.model.cost.forward
        head = unit.scored / (unit.positions + unit.scored)
        align = rank.model.alignment
        is_unshared, _ = agreement.tried(  # what fails here fails again in `build`
            lambda: samples is not None and without_sharing(self.config, samples, align, head)
        )
        return agreement.all_agree(bool(is_unshared), rank.experts, rank.device)

    def build(
        self,
        samples: Sequence[Pairs],
        microbatch_of: Sequence[int],
        request: Request,
        judge: Judge | None,
        *,
        find: Find | None = None,
    ) -> Forest:
        """The segments of a step, which asks no other rank; see `StepPlanner.build`.

        What ranks that share experts run side by side takes as long as on the longest, so they take
        the shortest length that any of them would choose, under the limit of the largest. They know
        both of the step before, as they hear of one another's segments when those are made.
        """
        planner, rank = self.planner(request), request.rank
        joins, most = request.may_join, self._most(samples, microbatch_of, request)
        length, forest = planner.build(samples, microbatch_of, judge, find, joins=joins, most=most)
        if rank.experts is not None and judge is not None:
            last = self._beside.get(planner)
            if last is not None and last.shortest < length:
                most = last.shortest
                forest = planner.build_at(most, samples, microbatch_of, find=find)
            forest = replace(forest, requested_length=length)
        return replace(forest, ordered=rank.ordered)

    def _most(
        self, samples: Sequence[Pairs], microbatch_of: Sequence[int], request: Request
    ) -> int | None:
        """While nothing is known of bytes, no segment is longer than the trainer's longest
        microbatch."""
        costs = request.costs
        if self.config.memory != "auto" or costs.is_known or not costs.counts or not samples:
            return None
        return int(np.bincount(microbatch_of, [len(sample) for sample in samples]).max())

    def build_together(
        self,
        samples: Sequence[Pairs],
        microbatch_of: Sequence[int],
        request: Request,
        judge: Judge | None,
    ) -> Forest:
        """As `build`, in the same rounds on all ranks that share experts, by the rank that has most
        in each; all of a first stage call this. For steps in which nothing crosses ranks, and a
        loss waits for those of all of them, microbatch by microbatch.

        Raises:
            Exception: what went wrong on this rank, or that something did on another.
        """
        planner = self.planner(request)

        def make() -> tuple[int, MicrobatchRows]:
            # Rounds by which all are cut have prompts apart.
            most = self._most(samples, microbatch_of, request)
            length, forest = planner.build(samples, microbatch_of, judge, joins=False, most=most)
            return length, MicrobatchRows.of(forest, microbatch_of)

        local: Any
        local, problem = agreement.tried(make)
        if problem is not None:
            local = f"rank {dist.get_rank()}: {type(problem).__name__}: {problem}"
        by_rank = agreement.all_say(local, request.rank.experts)
        if problem is not None:
            raise problem
        if failed := next((error for error in by_rank if isinstance(error, str)), ""):
            raise StepFailed(f"the step ends on all ranks: {failed}")
        length = min(length for length, _ in by_rank)
        rows = MicrobatchRows.most(rows for _, rows in by_rank)
        forest = planner.build_at(length, samples, microbatch_of, rows=rows)
        return replace(forest, ordered=True)

    def judge(self, request: Request) -> Judge | None:
        """Says of plans whether they keep the limit of memory, and how long they take; all ranks
        call this. None if there is no choice."""
        if request.rank.forward_only:
            return None
        self._memory.ask_once(request)
        last = self._beside.get(self.planner(request))
        least = 0.0 if last is None or math.isinf(last.limit) else last.limit

        return functools.partial(self._forecast, request=request, least=least)

    def forecast(
        self, forest: Forest, microbatch_of: Sequence[int], request: Request
    ) -> Prediction:
        """What a pipeline's segments would take if they ran side by side with no others; asks no
        other rank. Ranks have called `judge` for the step."""
        joint = JointForest.alone(forest, microbatch_of)
        return self._fitting(joint, request).prediction

    def _fitting(self, joint: JointForest, request: Request) -> Forecast:
        judge = functools.partial(self._forecast, request=request)
        return self.planner(request).fitting(joint, judge)

    def _forecast(
        self, joint: JointForest, plan: Plan, *, request: Request, least: float = 0.0
    ) -> Forecast:
        rank, peak, limit = request.rank, 0.0, 0.0
        if not rank.forward_only:
            longest = replace(plan, segments=longest_segments(joint))
            longest, peak = self._memory.limited(longest, joint, request, least)
            limit = self._memory.limit
            plan = replace(plan, policies=longest.policies)
        union = plan
        if joint.union is not joint.forest:
            union = replace(plan, segments=joint.union.segments)
        prediction = predict(
            request.times, joint.union, joint.union_microbatch_of, union,
            forward_only=rank.forward_only, num_pipelines=joint.num_pipelines,
        )  # fmt: skip
        retains = rank.forward_only or self.config.memory != "auto" or not any(plan.policies)
        return Forecast(plan, union, peak, limit, prediction, retains)

    def decided(self, step: Step, request: Request) -> tuple[StepReport, JointForest]:
        """Which schedule runs a step, and by which plan; all ranks that meet call this.

        Raises:
            UserError: ranks that meet would not run the same, or would wait for ever.
        """
        rank = request.rank
        experts = None if step.unshared else rank.experts
        even = rank.model.gathers_tokens
        joint = agreement.meet(step.forest, step.microbatch_of, experts, even=even)
        if joint.mixed:  # where segments are joined there is one stage, which knows the samples
            step, joint = self._all_apart(step, joint.union.requested_length, request)
        report = self._agreed_proposal(step, joint, request)
        if joint.union.requested_length:
            self._beside[self.planner(request)] = Beside(
                joint.union.requested_length, self._memory.limit
            )
        report.decision = self._together(report.decision, step, request)
        if rank.scale_functions and not rank.forward_only and report.decision.share:
            concurrent = replace(step, forest=joint.forest)
            report.decision = self._in_order(report, concurrent, request)
        if rank.experts is not None:
            # Actions that were not planned together with those of the other pipelines.
            program: Sequence[Any] | None = None
            if not report.decision.share:
                program = range(step.num_microbatches)
            elif self.config.plan_file:
                program = report.plan.programs[rank.stage]
            agreement.check_programs(program, rank.experts)
        return report, joint

    def _in_order(self, report: StepReport, step: Step, request: Request) -> Decision:
        """The decision where functions of the trainer's own scale losses, and may count their
        calls; all ranks that meet call this.

        Raises:
            CannotShare: losses are in another order, in mode "on".
        """
        rank = request.rank
        last = report.plan.actions_of(rank.num_stages - 1, len(rank.models) - 1)
        problem = None if are_in_order(step, last) else refused(SCALES_ORDER)
        meeting = rank.same_schedule if rank.experts is not None else ()
        groups = rank.companions if step.crosses else meeting
        reason = agreement.agree(problem, groups, rank.device)
        if reason is None:
            return report.decision
        if self.config.mode == "on":
            raise reason
        return replace(report.decision, share=False, fallback=True, reason=str(reason))

    def _agreed_proposal(self, step: Step, joint: JointForest, request: Request) -> StepReport:
        """What this rank would decide, if none fails of those that must decide alike, whether it
        has something to share or not."""
        propose = self._proposed_together if step.crosses else self._proposed_alone
        report, problem = agreement.tried(lambda: propose(step, joint, request))
        groups = request.rank.together(crosses=step.crosses)
        refusal = softened(problem, self.config.mode)
        reason = agreement.agree(refusal, groups, request.rank.device)
        if reason is not None or report is None:
            raise reason or RuntimeError("no rank says why there is no plan")
        return report

    def _proposed_alone(self, step: Step, joint: JointForest, request: Request) -> StepReport:
        if step.unshared:
            rank = request.rank
            plan = union = Plan((), ((),) * rank.num_stages, len(rank.models))
            return StepReport(step.forest, unshared(self.config), plan, union)
        return self.proposed(step, joint, request)[0]

    def _all_apart(self, step: Step, length: int, request: Request) -> tuple[Step, JointForest]:
        """A step with prompts apart beside those of ranks that share experts, in segments of at
        most so many positions (0: as many as the user allows); all that meet call this."""
        planner, rank = self.planner(request), request.rank
        length = length or planner.options.segment_tokens

        def apart() -> Step:
            samples = step.samples or ()
            forest = planner.build_at(length, samples, step.microbatch_of, joins=False)
            requested = step.forest.requested_length
            return step.with_forest(
                replace(forest, ordered=rank.ordered, requested_length=requested)
            )

        apart_step, problem = agreement.tried(apart)
        reason = agreement.agree(problem, rank.same_schedule, rank.device)
        if reason is not None:
            raise reason
        step = apart_step or step
        even = rank.model.gathers_tokens
        return step, agreement.meet(step.forest, step.microbatch_of, rank.experts, even=even)

    def _proposed_together(self, step: Step, joint: JointForest, request: Request) -> StepReport:
        """The decision of all data-parallel ranks where payloads cross them, as the slowest sets
        the pace and the most cautious of them decides, and what it rests on for this one."""
        rank = request.rank
        proposal, problem = agreement.tried(lambda: self.proposed(step, joint, request))
        numbers = [0.0] * 3
        if proposal is not None:
            seconds: Any = proposal[0].prediction
            numbers = [proposal[1], seconds.stock_seconds, seconds.prefix_seconds]
        numbers.append(self.config.min_speedup)
        worst, failed = agreement.worst(numbers, problem, rank.companions, rank.device)
        if problem is not None:
            raise problem
        if proposal is None or failed:
            raise StepFailed(f"the step ends on all ranks: {failed}")
        report, (over, stock, prefix, least) = proposal[0], worst
        config = replace(self.config, min_speedup=least)
        decision = decide(config, stock / prefix if prefix > 0 else 1.0)
        limit = self._memory.limit
        report.decision = kept_to_limit(self.config, decision, limit + over, limit)
        return report

    def proposed(
        self, step: Step, joint: JointForest, request: Request
    ) -> tuple[StepReport, float]:
        """What this rank alone would decide, and by how many bytes its predicted peak is above the
        limit; it asks no other rank."""
        rank = request.rank
        forecast = self._fitting(joint, request)
        decision = decide(self.config, forecast.prediction.speedup)
        # Ranks that share experts need equally many microbatches for one schedule and may need
        # segments of equal lengths for the other, so nothing is tried there.
        if not (forecast.over or rank.experts or step.crosses):
            for part in request.parts:
                decision = part.decided(decision)
        decision = kept_to_limit(self.config, decision, forecast.peak, forecast.limit)
        if decision.share and decision.over_limit and rank.is_first and not self._warned:
            self._warned = True
            logger.warning("mode on shares this step anyway: %s", decision.reason)
        report = StepReport(
            step.forest, decision, forecast.plan, forecast.union, prediction=forecast.prediction,
            times=request.times,
        )  # fmt: skip
        return report, forecast.over

    def _together(self, decision: Decision, step: Step, request: Request) -> Decision:
        rank = request.rank
        if rank.ordered:
            agreement.check_counts(step.num_microbatches, rank.groups.dp_cp, rank.device)
            why = "global_aux_loss needs one schedule"
            return agreement.share_together(decision, rank.groups.dp_cp, rank.device, why)
        if step.crosses:  # all have come to it together
            return decision
        # Buckets that are reduced during the backward are reduced in the order in which the stock
        # schedule's backward completes them, and ours is a fixed one
        # (features/overlap/reductions.py): the two differ for chunks that are interleaved, and
        # where neighbouring weights of a layer fill a bucket each.
        if self.config.mode == "auto" and not rank.forward_only and rank.overlaps:
            why = "overlap_grad_reduce needs one schedule"
            everyone = rank.data_ranks or default_groups().dp_cp
            return agreement.share_together(decision, everyone, rank.device, why)
        return decision
