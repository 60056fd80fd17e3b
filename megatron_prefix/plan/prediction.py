"""How long a step takes with either schedule, waiting in the pipeline included.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import CostModel, Features, Work, features, segment_work, stock_work
from megatron_prefix.plan.simulator import simulate
from megatron_prefix.tree import Forest


class Prediction(NamedTuple):
    """What both schedules would compute in a step on one rank, and how long they would take.

    Waiting is in the features, as if it were work.
    """

    stock_features: Features
    prefix_features: Features
    stock_seconds: float
    prefix_seconds: float

    @property
    def speedup(self) -> float:
        """Time of the stock schedule over that of the prefix schedule."""
        return self.stock_seconds / self.prefix_seconds if self.prefix_seconds > 0 else 1.0


def predict(
    cost: CostModel,
    forest: Forest,
    microbatch_of: Sequence[int],
    plan: Plan,
    *,
    forward_only: bool = False,
    num_pipelines: int = 1,
) -> Prediction:
    """Both schedules' times of a step.

    Args:
        cost: seconds on one rank, of this model, layout and device.
        forest: the step's segments; the union's where several pipelines share experts.
        microbatch_of: the trainer's microbatch of each of its rollouts.
        plan: on the same segments.
        forward_only: backwards compute nothing.
        num_pipelines: pipelines that run the plan side by side, each on its part of the positions.
    """
    kinds = "F" if forward_only else "FB"
    stock = _stock(forest, microbatch_of, plan, kinds, num_pipelines)
    prefix = _prefix(cost, plan, kinds, num_pipelines)
    return Prediction(
        stock, prefix, cost.stock_factor * cost.of(stock), cost.prefix_factor * cost.of(prefix)
    )


def _stock(
    forest: Forest, microbatch_of: Sequence[int], plan: Plan, kinds: str, num_pipelines: int
) -> Features:
    """The stock schedule on one rank.

    While a pipeline fills and drains every rank waits as long as (ranks - 1) / model chunks
    microbatches take ("Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", sections 2.2.1 and 2.2.2).
    """
    work = stock_work(forest, microbatch_of)
    if forest.ordered:  # equal numbers are the same microbatch on all pipelines
        work = work._replace(actions=work.actions * num_pipelines)
    num = work.actions / num_pipelines
    waits = 1 + (plan.num_ranks - 1) / plan.num_chunks / num if num else 1.0
    mean = Work(*(number / num_pipelines for number in work))
    return waits * features(mean._replace(actions=num * plan.num_chunks, calls=num), kinds)


def _prefix(cost: CostModel, plan: Plan, kinds: str, num_pipelines: int) -> Features:
    """The plan on one rank; where stages wait for one another, as long as it is simulated."""
    work = np.array([segment_work(s) for s in plan.segments]).reshape(-1, len(Work._fields))
    work /= (num_pipelines, num_pipelines, num_pipelines, 1 / plan.num_chunks, 1, num_pipelines)
    again = np.array([plan.policy(i) == "recompute" for i in range(len(work))], bool)[:, None]
    forwards = np.hstack([work, np.zeros_like(work)])
    backwards = np.hstack([work * again, work]) * ("B" in kinds)
    total: Features = forwards.sum(0) + backwards.sum(0)
    computed = cost.of(total)
    if plan.num_ranks == 1 or computed <= 0:
        return total
    prices, names = np.array(cost.prices), [*map(id, plan.segments)]
    seconds = {
        kind: dict(zip(names, (rows @ prices).tolist(), strict=True))
        for kind, rows in (("F", forwards), ("B", backwards))
    }
    timeline = simulate(plan, cost=lambda segment, kind: seconds[kind][id(segment)])
    return total * (timeline.makespan / computed)
