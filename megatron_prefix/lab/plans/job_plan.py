"""The plans of all data-parallel ranks of a step whose prompts run once in the job. [pure]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_prefix.features.across.common import beginnings_of, common_spans
from megatron_prefix.features.across.ranges import told_together
from megatron_prefix.features.across.tries import find_below
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.plans.job import JobTimeline, simulate_job
from megatron_prefix.lab.plans.messages import with_messages
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import FLOPS_PER_SECOND, CostModel
from megatron_prefix.plan.planner import best_plan, loss_ready_after
from megatron_prefix.plan.walk import Cost, token_cost
from megatron_prefix.tree import Forest, Pairs, TreeOptions
from megatron_prefix.tree.payload_map import Form


@dataclass(frozen=True)
class JobPlan:
    """What every data-parallel rank does, each with one pipeline stage.

    Attributes:
        forests: segments of each.
        plans: with every message.
        ready_after: see `planner.loss_ready_after`.
    """

    forests: tuple[Forest, ...]
    plans: tuple[Plan, ...]
    ready_after: tuple[list[int], ...]

    @property
    def executed_tokens(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(one.executed_tokens for one in self.forests)

    @property
    def received_tokens(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(one.received_tokens for one in self.forests)

    @property
    def sent_tokens(self) -> tuple[int, ...]:
        """Of each rank, once for every rank that gets them."""
        return tuple(
            sum(
                plan.segments[one.segment].spans[n].length
                for one in plan.transfers
                for n in one.spans
            )
            for plan in self.plans
        )

    def timeline(
        self, cost: Cost = token_cost, messages: tuple[float, float] = (0.0, 0.0)
    ) -> JobTimeline:
        """Simulates the job.

        Args:
            cost: of actions; see `simulate_job`.
            messages: time of a position's payload, and of its gradients.
        """
        sent, back = messages
        return simulate_job(
            self.plans, self.ready_after, cost=cost, seconds_per_position_sent=sent,
            seconds_per_position_back=back,
        )  # fmt: skip


def job_plan(
    ranks: Sequence[Sequence[Pairs]],
    microbatch_of: Sequence[Sequence[int]],
    options: TreeOptions,
) -> JobPlan:
    """Plans a dealt step, as every rank would for itself.

    Args:
        ranks: the rollouts of each.
        microbatch_of: the microbatch of each of them.
        options: how rollouts become segments.
    """
    both = [*zip(ranks, microbatch_of, strict=True)]
    told = [beginnings_of(one, options) for one in ranks]
    heard = told_together([beginnings for beginnings, _ in told])
    forests, plans, ready_after = [], [], []
    for rank, (rollouts, microbatches) in enumerate(both):
        common = common_spans(heard, rank, options)
        tries = find_below(rollouts, options, told[rank][1], common)
        forest = tries.forest(microbatch_of=microbatches)
        forests.append(forest)
        plans.append(with_messages(best_plan(forest, microbatches=microbatches), forest))
        ready_after.append(loss_ready_after(forest, microbatches))
    return JobPlan(tuple(forests), tuple(plans), tuple(ready_after))


def rank_cost(spec: ModelSpec, layout: Layout) -> CostModel:
    """What work takes on one rank of a GPU cluster, as mode auto guesses it before it measures."""
    rate = FLOPS_PER_SECOND["cuda"] * layout.tp * layout.cp
    return cost_of(spec).in_seconds(rate, spec.num_layers, layout.pp, layout.vpp)


def message_seconds(
    spec: ModelSpec, layout: Layout, bytes_per_second: float
) -> tuple[float, float]:
    """Seconds of one position's payload on its way, and of its gradients, which are fp32.

    What spans leave that have no row a position (recurrent states) is not counted.

    Context-parallel ranks send a part of it each, all at once.

    Args:
        spec, layout: of the model; bf16.
        bytes_per_second: of one GPU.
    """
    form = Execution(num_stages=layout.pp, tp=layout.tp, cp=layout.cp)
    stages = footprint_of(spec, form).payloads
    rows = [one for stage in stages for one in stage if one.form == Form.POSITIONS]
    values, gradients = sum(one.values for one in rows), sum(one.gradients for one in rows)
    together = bytes_per_second * layout.cp
    return values / together, gradients / together
