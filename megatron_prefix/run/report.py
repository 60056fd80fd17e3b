"""What a step did and how long it took, for metrics and benchmarks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.gate import Decision
from megatron_prefix.plan.memory import RankMemory
from megatron_prefix.plan.prediction import Prediction
from megatron_prefix.run.rank import Rank
from megatron_prefix.tree import Forest

logger = logging.getLogger(__name__)


@dataclass
class StepReport:
    """What the last step did; the numbers behind the `prefix_sharing/` metrics.

    Attributes:
        forest: the step's prefix trees as segments; `raw_tokens` counts the positions of all
            rollouts, `executed_tokens` those that are computed.
        decision: `share`, the `reason` in one line, and `predicted_speedup` over the stock
            schedule.
        plan: what the prefix schedule runs or would have run.
        union_plan: the same, on the segments of all ranks that share experts.
        prediction: predicted seconds of both schedules on this rank; None if nothing was predicted.
        times: coefficients of the cost model; None as long as nothing was measured.
        fallback_count: steps so far in which the stock schedule ran although sharing was wanted.
        memory: predicted bytes of this rank, where the prefix schedule ran with gradients; what
            segments keep is in them once it has been measured.
        base_bytes: bytes allocated on the device when the step began, without buffers of this
            package that stay between steps, which `memory` counts.
        room_bytes: bytes that the step may use on top of these; 0 if that is not known.
        cache_bytes: the most bytes that K/V, states and their gradients took on the device.
        crossed: what this rank exchanged with other data-parallel ranks; None if nothing could
            cross.
        why_alone: why nothing crossed where it could have; on the first pipeline stage.
        retried: whether the step ran again, after memory had run out or with the stock schedule.
        features: what parts of the schedule report, by their names ("verify", "host memory", ...).
    """

    forest: Forest
    decision: Decision
    plan: Plan
    union_plan: Plan
    fallback_count: int = 0
    prediction: Prediction | None = None
    times: CostModel | None = None
    memory: RankMemory | None = None
    base_bytes: int = 0
    room_bytes: float = 0.0
    cache_bytes: int = 0
    crossed: Any = None
    why_alone: str = ""
    retried: bool = False
    features: dict[str, Any] = field(default_factory=dict)

    @property
    def fallback_reason(self) -> str | None:
        """Why the stock schedule ran although sharing was wanted; None where it did not."""
        return self.decision.reason if self.decision.fallback else None


class Reports:
    """The report of a schedule's last step, and what is logged of its steps.

    Attributes:
        logged: lines that have been logged, once each.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.last: StepReport | None = None
        self.logged: set[str] = set()

    def put(self, report: StepReport) -> None:
        before = self.last.fallback_count if self.last else 0
        report.fallback_count = before + bool(report.decision.fallback)
        self.last = report
        if report.decision.fallback and report.decision.reason not in self.logged:
            logger.warning("stock schedule for this step: %s", report.decision.reason)

    def stock(self, decision: Decision) -> StepReport:
        plan = Plan((), ((),), 1)
        report = StepReport(Forest((), (), ()), decision, plan, plan)
        self.put(report)
        return report

    def refused(self, reason: UserError) -> None:
        """A step that the stock schedule runs, since it cannot be shared; mode "on" raises."""
        if self._mode == "on":
            raise reason
        self.stock(Decision(False, str(reason), self._mode == "auto", 1.0))
        self.logged.add(str(reason))  # it is the same in every step, and logged once


def log_shared(report: StepReport, rank: Rank, logged: set[str], runs: bool) -> None:
    """Logs once on the first rank what runs of the first shared pass, and of the first update.

    As a warning: many a trainer hides other lines of a package that it does not know.
    """
    name = " in passes without gradients" if rank.forward_only else ""
    groups = [rank.groups.tp, *filter(None, [rank.data_ranks])]
    if name in logged or not rank.is_first or any(group.rank() for group in groups):
        return
    logged.add(name)
    logger.warning(
        "prefix sharing is %s%s: rank 0 %s %s of %s tokens (%.1fx predicted)",
        "on" if runs else "observed", name, "computes" if runs else "would compute",
        f"{report.forest.executed_tokens:,}", f"{report.forest.raw_tokens:,}",
        report.decision.predicted_speedup,
    )  # fmt: skip
