"""Seconds of work, and of whole steps with either schedule.  Pure.

The time of an action is linear in what it computes (plan/cost.py), with coefficients of their own
for forward and backward. Until actions have been measured (plan/cost_fit.py) the coefficients come
from FLOPs and from guesses of what an action and an attention call cost besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.cost import CostModel, Work, segment_work, stock_work
from megatron_prefix.plan.simulator import ActionTime, simulate
from megatron_prefix.tree import Forest, Segment

Row = NDArray[np.float64]
"""Work of forwards, then of backwards: float64 [NUM_COEFFICIENTS]."""

NUM_COEFFICIENTS = 2 * len(Work._fields)
_FORWARD, _BACKWARD = slice(0, len(Work._fields)), slice(len(Work._fields), NUM_COEFFICIENTS)

ACTION_SECONDS, CALL_SECONDS = 3e-4, 5e-5
"""A layer's forward beyond its FLOPs, and an attention call's: launches of kernels."""
FLOPS_PER_SECOND = {"cuda": 4e14, "cpu": 5e10}
"""By torch's type of device, until actions have been measured."""


@dataclass(frozen=True)
class Shape:
    """How a model is spread over ranks.

    Attributes:
        num_layers: of the whole model.
        num_ranks: pipeline size.
        num_chunks: model chunks a rank.
        parts: ranks that share the work of every layer: tensor and context parallelism.
    """

    num_layers: int
    num_ranks: int = 1
    num_chunks: int = 1
    parts: int = 1


def row(work: Work, kinds: str) -> Row:
    """Work as features of the forward ("F"), of the backward ("B") or of both ("FB")."""
    found = np.zeros(NUM_COEFFICIENTS)
    if "F" in kinds:
        found[_FORWARD] = work
    if "B" in kinds:
        found[_BACKWARD] = work
    return found


def action_row(plan: Plan, action: Action, rank: int) -> Row:
    """What one action of a rank computes; a backward may run its forward again.

    Only the last stage has the output layer. A model chunk has its share of a rank's layers.
    """
    work, share = segment_work(plan.segments[action.segment]), 1 / plan.num_chunks
    is_last = plan.stage(rank, action.chunk) == plan.num_stages - 1
    work = Work(
        work.positions * share, work.scored if is_last else 0.0, work.pairs * share,
        work.actions, work.calls * share,
    )  # fmt: skip
    again = action.kind == "B" and plan.policy(action.segment) == "recompute"
    return row(work, "FB" if again else action.kind)


@dataclass(frozen=True)
class TimeModel:
    """Seconds of a rank's actions.

    Attributes:
        coefficients: seconds on one rank for a unit of each feature, forward and backward.
        stock: measured time of whole steps with the stock schedule over what the coefficients say.
        prefix: the same with the prefix schedule.
    """

    coefficients: tuple[float, ...]
    stock: float = 1.0
    prefix: float = 1.0

    @classmethod
    def of_flops(
        cls, cost: CostModel, shape: Shape, flops_per_second: float, frozen: float = 0.0
    ) -> TimeModel:
        """Before anything is measured: a rate for all FLOPs, and guessed overheads.

        Args:
            cost: of the model.
            shape: how it is spread.
            flops_per_second: of one rank.
            frozen: share of the weights that are not trained, 0 to 1: they have no gradient to
                compute, so sharing saves less beside attention and overheads.
        """
        layers = shape.num_layers / shape.num_ranks
        flop = 1 / (flops_per_second * shape.parts)
        forward = Work(
            cost.linear * flop / shape.num_ranks, cost.head * flop,
            cost.attention * flop / shape.num_ranks,
            ACTION_SECONDS * layers / shape.num_chunks, CALL_SECONDS * layers,
        )  # fmt: skip
        products = 2 - frozen
        times = Work(positions=products, scored=products, pairs=2, actions=2, calls=2)
        return cls((*forward, *(t * seconds for t, seconds in zip(times, forward, strict=True))))

    def seconds(self, row: Row) -> float:
        """Time of some work on one rank, without the factors of whole steps."""
        return float(row @ np.array(self.coefficients))

    def scaled(self, factor: float) -> TimeModel:
        """All coefficients times a factor."""
        return replace(self, coefficients=tuple(factor * c for c in self.coefficients))


def action_seconds(times: TimeModel, plan: Plan) -> ActionTime:
    """Time of a plan's actions on each rank: only the last stage has the output layer."""
    return lambda action, rank: times.seconds(action_row(plan, action, rank))


class Prediction(NamedTuple):
    """What both schedules would compute in a step, and how long they would take.

    The rows are those of one rank, waiting included as if it were work.
    """

    stock_row: Row
    prefix_row: Row
    stock_seconds: float
    prefix_seconds: float

    @property
    def speedup(self) -> float:
        """Time of the stock schedule over that of the prefix schedule."""
        return self.stock_seconds / self.prefix_seconds if self.prefix_seconds > 0 else 1.0


def predict(
    times: TimeModel,
    forest: Forest,
    microbatch_of: Sequence[int],
    plan: Plan,
    *,
    forward_only: bool = False,
    num_pipelines: int = 1,
) -> Prediction:
    """Both schedules' times of a step.

    Args:
        times: of this model, layout and device.
        forest: the step's segments; the union's where several pipelines share experts.
        microbatch_of: the trainer's microbatch of each of its rollouts.
        plan: on the same segments.
        forward_only: backwards compute nothing.
        num_pipelines: pipelines that run the plan side by side, each on its part of the positions.
    """
    kinds = "F" if forward_only else "FB"
    stock = _stock_row(forest, microbatch_of, plan, kinds, num_pipelines)
    prefix = _prefix_row(times, plan, kinds, num_pipelines)
    return Prediction(
        stock, prefix, times.stock * times.seconds(stock), times.prefix * times.seconds(prefix)
    )


def _stock_row(
    forest: Forest, microbatch_of: Sequence[int], plan: Plan, kinds: str, num_pipelines: int
) -> Row:
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
    return waits * row(mean._replace(actions=num * plan.num_chunks, calls=num), kinds)


def _prefix_row(times: TimeModel, plan: Plan, kinds: str, num_pipelines: int) -> Row:
    """The plan on one rank; where stages wait for one another, as long as it is simulated."""
    forwards = np.array([segment_work(s) for s in plan.segments]).reshape(-1, len(Work._fields))
    forwards /= (num_pipelines, num_pipelines, num_pipelines, 1 / plan.num_chunks, 1)
    again = np.array([plan.policy(i) == "recompute" for i in range(len(forwards))], bool)
    work = {"F": np.zeros((len(forwards), NUM_COEFFICIENTS))}
    work["B"] = work["F"].copy()
    work["F"][:, _FORWARD] = forwards
    if "B" in kinds:
        work["B"][:, _FORWARD] = forwards * again[:, None]
        work["B"][:, _BACKWARD] = forwards
    total: Row = work["F"].sum(0) + work["B"].sum(0)
    computed = times.seconds(total)
    if plan.num_ranks == 1 or computed <= 0:
        return total
    place = {id(segment): index for index, segment in enumerate(plan.segments)}
    seconds = {kind: rows @ np.array(times.coefficients) for kind, rows in work.items()}

    def cost(segment: Segment, kind: str) -> float:
        return float(seconds[kind][place[id(segment)]])

    return total * (simulate(plan, cost=cost).makespan / computed)
