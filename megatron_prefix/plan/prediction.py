"""Predicted time of a step with either schedule, including waits in the pipeline; and the stock
schedule as a plan, whose memory ours must not exceed.  Pure.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import (
    AGAIN,
    CostModel,
    Features,
    Work,
    features,
    stock_work,
    works,
)
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.plan.walk import walk
from megatron_prefix.tree import Forest, Segment, Span

OVER_STOCK, LEAST_OVER = 0.05, 0.5 * 2**30
"""Memory beyond the stock schedule's that a step may take: a share of its peak, weights and
gradients included, and at least so many bytes."""


class Prediction(NamedTuple):
    """Features and seconds of a step on one rank with both schedules; waits count as work."""

    stock_features: Features
    prefix_features: Features
    stock_seconds: float
    prefix_seconds: float

    @property
    def speedup(self) -> float:
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
        num_pipelines: that run the plan side by side, each on its part of the positions.
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
    """The plan on one rank, scaled to the simulated time of a pipeline."""
    work = np.array(works(plan.segments)).reshape(-1, len(Work._fields))
    work /= (num_pipelines, num_pipelines, num_pipelines, 1 / plan.num_chunks, 1, num_pipelines)
    recomputed = np.array([AGAIN.get(plan.policy(i), 0.0) for i in range(len(work))])[:, None]
    forwards = np.hstack([work, np.zeros_like(work)])
    backwards = np.hstack([work * recomputed, work]) * ("B" in kinds)
    total: Features = forwards.sum(0) + backwards.sum(0)
    computed = cost.of(total)
    if plan.num_ranks == 1 or computed <= 0:
        return total
    prices = np.array(cost.prices)
    seconds = {
        kind: (rows @ prices * (1 / plan.num_chunks)).tolist()
        for kind, rows in (("F", forwards), ("B", backwards))
    }
    return total * (walk(plan, [seconds] * plan.num_stages) / computed)


# Memory ------------------------------------------------------------------------------------------


def limit_of(stock: float, static: float) -> float:
    """Bytes that a step may take besides weights and gradients, which are `static`; `stock` is what
    the stock schedule takes besides them."""
    return stock + max(OVER_STOCK * (stock + static), LEAST_OVER)


def heaviest_stock_plan(
    forest: Forest, microbatches_of: Sequence[Sequence[int]], num_ranks: int, num_chunks: int = 1
) -> Plan:
    """One forward one backward over the consecutive microbatches with the most positions, of any
    pipeline.

    Twice as many microbatches as a pipeline holds at once (with virtual stages all), so its peak of
    memory is that of the whole step. Padding of rollouts counts.

    Args:
        forest: has the rollouts of all pipelines, one pipeline after another.
        microbatches_of: per pipeline the trainer's microbatch of each of its rollouts.
        num_ranks: pipeline size.
        num_chunks: model chunks a rank.
    """
    owners = tuple(map(tuple, microbatches_of))
    return _heaviest(forest.num_positions, forest.multiple, owners, num_ranks, num_chunks)


@functools.lru_cache(maxsize=16)  # the same for all segments that a step is tried in
def _heaviest(
    num_positions: Sequence[int],
    multiple: int,
    microbatches_of: Sequence[Sequence[int]],
    num_ranks: int,
    num_chunks: int,
) -> Plan:
    num_live = 2 * num_ranks if num_ranks > 1 else 1
    first = 0
    heaviest: list[list[int]] = []
    for microbatch_of in microbatches_of:
        lengths = collections.defaultdict(list)
        for rollout, microbatch in enumerate(microbatch_of, first):
            lengths[microbatch].append(-(-num_positions[rollout] // multiple) * multiple)
        first += len(microbatch_of)
        local = [lengths[microbatch] for microbatch in sorted(lengths)]
        num = len(local) if num_chunks > 1 else min(len(local), num_live)
        ends = [*itertools.accumulate(map(sum, local), initial=0)]
        size, begin = max(
            (ends[begin + num] - ends[begin], -begin) for begin in range(len(local) - num + 1)
        )
        if size > sum(map(sum, heaviest)):
            heaviest = local[-begin : num - begin]
    owners = [number for number, microbatch in enumerate(heaviest) for _ in microbatch]
    rollouts = itertools.count()
    segments = [
        Segment(
            tuple(Span(0, n, n, (next(rollouts),)) for n in microbatch), inner=False, scored=True
        )
        for microbatch in heaviest
    ]
    padded = tuple(itertools.chain(*heaviest))
    part = Forest(tuple(segments), padded, tuple(n - 1 for n in padded), multiple)
    return make_plan(part, num_ranks, num_chunks=num_chunks, microbatches=owners, run_ahead=1)
