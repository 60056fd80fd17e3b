"""Deciding: the segments of a step, its plan, and which schedule runs it.

What is decided is the same on all ranks that must agree; where it takes more than one to know, they
ask one another (run/agreement.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import StepFailed
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.gate import (
    Decision,
    decide,
    kept_to_limit,
    unshared,
    without_sharing,
)
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.prediction import Prediction, predict
from megatron_prefix.plan.step_planner import Common, Judge, StepPlanner, Verdict, fitting
from megatron_prefix.run import agreement, global_aux_sync
from megatron_prefix.run.cost_meter import CostMeter, guessed
from megatron_prefix.run.memory_control import MemoryControl, longest_segments
from megatron_prefix.run.rank import Rank, default_groups
from megatron_prefix.run.report import StepReport
from megatron_prefix.run.step import Step
from megatron_prefix.tree import Forest, Pairs
from megatron_prefix.tree.rounds import Rows

logger = logging.getLogger(__name__)


class Forecast(NamedTuple):
    """What is predicted of a plan.

    Attributes:
        plan: with the policies that it would have.
        union: the same on the segments of all pipelines that run side by side.
        peak, limit: bytes besides weights and gradients, of the rank with most; 0 in a step without
            gradients.
        prediction: of both schedules' times.
        verdict: on the plan.
    """

    plan: Plan
    union: Plan
    peak: float
    limit: float
    prediction: Prediction
    verdict: Verdict


class Beside(NamedTuple):
    """What ranks that share experts knew of one another in their last step with gradients.

    Attributes:
        shortest: the least of the segment lengths that they would choose, each alone.
        limit: bytes that the one with most may take besides weights and gradients.
    """

    shortest: int
    limit: float


class Planning:
    """What one schedule decides with: plans that it knows, and times that it has measured.

    Args:
        config: what the user set.
        memory: says what fits.

    Attributes:
        config: as given.
        meters: times, by model and layout.
    """

    def __init__(self, config: PrefixConfig, memory: MemoryControl) -> None:
        self.config, self._memory = config, memory
        self._planners: dict[Any, StepPlanner] = {}
        self._beside: dict[StepPlanner, Beside] = {}
        self.meters: dict[Any, CostMeter] = {}

    def planner(self, rank: Rank) -> StepPlanner:
        """The planner of a rank's pipeline, which remembers its plans."""
        turn = rank.config.microbatch_group_size_per_vp_stage
        shape = rank.num_stages, len(rank.models), turn
        key = guessed(rank), rank.alignment, *shape, rank.whole
        if key not in self._planners:
            self._planners[key] = StepPlanner(self.config, *key)
        return self._planners[key]

    def meter(self, rank: Rank) -> CostMeter:
        """What is known of a model's times; all ranks ask together the first time."""
        layers = rank.config.num_layers
        key = rank.cost, layers, rank.num_stages, len(rank.models), rank.parts
        if key not in self.meters:
            self.meters[key] = CostMeter(self.config, rank)
        return self.meters[key]

    def shares_nothing(self, samples: Sequence[Pairs] | None, rank: Rank) -> bool:
        """Whether a step is without sharing, for which no tree is built; all ranks of a first
        stage that share experts ask, and all of their steps must be such."""
        if self.config.mode != "auto":
            return False
        unit = rank.cost.forward
        head = unit.scored / (unit.positions + unit.scored)
        mine = samples is not None and without_sharing(self.config, samples, rank.alignment, head)
        return agreement.all_agree(mine, rank.experts, rank.device)

    def build(
        self,
        samples: Sequence[Pairs],
        microbatch_of: Sequence[int],
        rank: Rank,
        judge: Judge | None,
        *,
        forward_only: bool,
        common: Common | None = None,
    ) -> Forest:
        """The segments of a step, which asks no other rank; see `StepPlanner.build`.

        What ranks that share experts run side by side takes as long as on the longest, so they take
        the shortest length that any of them would choose, under the limit of the largest. They know
        both of the step before, as they hear of one another's segments when those are made.
        """
        planner, groups = self.planner(rank), [0] * len(samples)
        length, forest = planner.build(samples, groups, microbatch_of, judge, common)
        if rank.experts is not None and judge is not None:
            known = self._beside.get(planner)
            if known is not None and known.shortest < length:
                most = known.shortest
                forest = planner.build_at(most, samples, groups, microbatch_of, common=common)
            forest = replace(forest, wanted=length)
        return replace(forest, ordered=rank.has_global_loss and not forward_only)

    def cuts_together(self, rank: Rank, *, forward_only: bool) -> bool:
        """Whether `build_together` makes the segments of a step in which nothing crosses ranks:
        where a loss waits for those of all ranks that share experts, microbatch by microbatch."""
        waits = rank.experts is not None and rank.has_global_loss and not forward_only
        return waits and not self.config.plan_file

    def build_together(
        self,
        samples: Sequence[Pairs],
        microbatch_of: Sequence[int],
        rank: Rank,
        judge: Judge | None,
    ) -> Forest:
        """As `build`, in the same rounds on all ranks that share experts, by the rank that has most
        in each; all of a first stage call this.

        Raises:
            Exception: what went wrong on this rank, or that something did on another.
        """
        planner, groups = self.planner(rank), [0] * len(samples)
        mine: Any = None
        problem: Exception | None = None
        try:
            length, forest = planner.build(samples, groups, microbatch_of, judge)
            mine = length, Rows.of(forest, microbatch_of)
        except Exception as error:  # noqa: BLE001  # the other ranks wait to hear of it
            problem, mine = error, f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        group: Any = rank.experts
        heard: list[Any] = [None] * group.size()
        dist.all_gather_object(heard, mine, group=group)
        if problem is not None:
            raise problem
        if failed := next((one for one in heard if isinstance(one, str)), ""):
            raise StepFailed(f"the step ends on all ranks: {failed}")
        length, rows = min(length for length, _ in heard), Rows.most(rows for _, rows in heard)
        forest = planner.build_at(length, samples, groups, microbatch_of, rows=rows)
        return replace(forest, ordered=True)

    def judge(self, rank: Rank, *, forward_only: bool) -> Judge | None:
        """Says of plans whether they keep the limit of memory, and how long they take; all ranks
        call this. None if there is no choice."""
        if forward_only:
            return None
        self._memory.ask_once(rank)
        known = self._beside.get(self.planner(rank))
        least = 0.0 if known is None else known.limit

        def judged(forest: Forest, microbatch_of: Sequence[int], plan: Plan) -> Verdict:
            joint = JointForest.alone(forest, microbatch_of)
            return self._forecast(plan, joint, rank, forward_only=False, least=least).verdict

        return judged

    def forecast(
        self, forest: Forest, microbatch_of: Sequence[int], rank: Rank, *, forward_only: bool
    ) -> Prediction:
        """What a pipeline's segments would take if they ran side by side with no others; asks no
        other rank. Ranks have called `judge` for the step."""
        joint = JointForest.alone(forest, microbatch_of)
        return self._fitting(joint, rank, forward_only=forward_only).prediction

    def _fitting(self, joint: JointForest, rank: Rank, *, forward_only: bool) -> Forecast:
        """Of the plan that keeps the limit of memory, if one does."""
        plans = self.planner(rank).plans(joint)
        tried = (self._forecast(plan, joint, rank, forward_only=forward_only) for plan in plans)
        return fitting(tried, lambda one: one.verdict)

    def _forecast(
        self,
        plan: Plan,
        joint: JointForest,
        rank: Rank,
        *,
        forward_only: bool,
        least: float = 0.0,
    ) -> Forecast:
        peak = limit = 0.0
        if not forward_only:
            longest = replace(plan, segments=longest_segments(joint))
            factors = self.meter(rank).memory_factors
            longest, peak = self._memory.limited(longest, joint, rank, factors, least)
            limit = self._memory.limit
            plan = replace(plan, policies=longest.policies)
        union = plan
        if joint.union is not joint.forest:
            union = replace(plan, segments=joint.union.segments)
        found = predict(
            self.meter(rank).times, joint.union, joint.union_microbatch_of, union,
            forward_only=forward_only, num_pipelines=joint.num_pipelines,
        )  # fmt: skip
        retains = forward_only or self.config.memory != "auto" or not any(plan.policies)
        verdict = Verdict(max(0.0, peak - limit), found.prefix_seconds, retains)
        return Forecast(plan, union, peak, limit, found, verdict)

    def of_stock(self, step: Step, rank: Rank) -> tuple[Prediction, float]:
        """Of a step without segments what the stock schedule computes, with nothing beside it, and
        the bytes that it is predicted to take on this rank; it asks no other rank."""
        joint = JointForest.alone(step.forest, step.microbatch_of)
        plan = Plan((), ((),) * rank.num_stages, len(rank.models))
        found = predict(self.meter(rank).times, joint.union, joint.union_microbatch_of, plan)
        return found, self._memory.stock_peak(joint, rank)

    def decided(
        self, step: Step, rank: Rank, *, forward_only: bool
    ) -> tuple[StepReport, JointForest]:
        """Which schedule runs a step, and by which plan; all ranks that meet call this.

        Raises:
            UserError: ranks that meet would not run the same, or would wait for ever.
        """
        if step.unshared:
            joint = JointForest.alone(step.forest, step.microbatch_of)
            plan = union = Plan((), ((),) * rank.num_stages, len(rank.models))
            report = StepReport(step.forest, unshared(self.config), plan, union)
        else:
            joint = agreement.meet(step.forest, step.microbatch_of, rank.experts)
            report = self._predicted(step, joint, rank, forward_only=forward_only)
            if joint.union.wanted:
                found = Beside(joint.union.wanted, self._memory.limit)
                self._beside[self.planner(rank)] = found
        ordered = rank.has_global_loss and not forward_only
        report.decision = self._together(
            report.decision, step, rank, ordered=ordered, forward_only=forward_only
        )
        if ordered and not step.unshared:
            global_aux_sync.prove(report.plan, joint, rank.stage)
        agreement.check_programs(self._unplanned(report, step, rank), rank.experts)
        if report.decision.share:
            agreement.check_dispatcher(rank.config, joint)
        return report, joint

    def _predicted(
        self, step: Step, joint: JointForest, rank: Rank, *, forward_only: bool
    ) -> StepReport:
        """This rank's decision, and what it rests on; that of all data-parallel ranks where
        payloads cross them, as the slowest sets the pace."""
        if not rank.crosses:
            return self.proposed(step, joint, rank, forward_only=forward_only)[0]
        report: StepReport | None = None
        problem, mine = None, [0.0] * 3
        try:
            report, over = self.proposed(step, joint, rank, forward_only=forward_only)
            seconds = report.prediction
            mine = [over, seconds.stock_seconds, seconds.prefix_seconds]  # type: ignore[union-attr]
        except Exception as error:  # noqa: BLE001  # the other ranks wait to hear of it
            problem = error
        worst, failed = agreement.worst(mine, problem, rank.companions, rank.device)
        if problem is not None:
            raise problem
        if report is None or failed:
            raise StepFailed(f"the step ends on all ranks: {failed}")
        over, stock, prefix = worst
        decision = decide(self.config, stock / prefix if prefix > 0 else 1.0)
        limit = self._memory.limit
        report.decision = kept_to_limit(self.config, decision, limit + over, limit)
        return report

    def proposed(
        self, step: Step, joint: JointForest, rank: Rank, *, forward_only: bool
    ) -> tuple[StepReport, float]:
        """What this rank alone would decide, and by how many bytes its predicted peak is above the
        limit; it asks no other rank."""
        found, meter = self._fitting(joint, rank, forward_only=forward_only), self.meter(rank)
        decision = decide(self.config, found.prediction.speedup)
        # Ranks that share experts need equally many microbatches for one schedule and may need
        # segments of equal lengths for the other, so nothing is tried there.
        if meter.due and not (found.verdict.over or rank.experts or rank.crosses):
            decision = meter.chosen(decision)
        decision = kept_to_limit(self.config, decision, found.peak, found.limit)
        report = StepReport(
            step.forest, decision, found.plan, found.union, prediction=found.prediction,
            times=meter.times, stock_bytes=0.0 if forward_only else self._memory.stock_bytes,
        )  # fmt: skip
        return report, found.verdict.over

    def _together(
        self, decision: Decision, step: Step, rank: Rank, *, ordered: bool, forward_only: bool
    ) -> Decision:
        """The decision of all data-parallel ranks where they need one."""
        if ordered:
            global_aux_sync.check_counts(step.num_microbatches, rank.groups.dp_cp, rank.device)
            why = "global_aux_loss needs one schedule"
            return agreement.share_together(decision, rank.groups.dp_cp, rank.device, why)
        if rank.crosses:  # all have come to it together
            return decision
        # Buckets that are reduced during the backward are reduced in the order in which the stock
        # schedule's backward completes them, and ours is a fixed one (run/overlap.py): the two
        # differ for chunks that are interleaved, and where neighbouring weights of a layer fill a
        # bucket each.
        if self.config.mode == "auto" and not forward_only and rank.overlaps:
            why = "overlap_grad_reduce needs one schedule"
            everyone = rank.data_ranks or default_groups().dp_cp
            return agreement.share_together(decision, everyone, rank.device, why)
        return decision

    def _unplanned(self, report: StepReport, step: Step, rank: Rank) -> Sequence[Any] | None:
        """Actions of a rank that were not planned together with those of other pipelines."""
        if not report.decision.share:
            return range(step.num_microbatches)
        return report.plan.programs[rank.stage] if self.config.plan_file else None
