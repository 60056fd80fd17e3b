"""How the time of planning grows with the step: processor seconds beside the step's predicted ones.

    python -m benchmarks.plan_growth [--quick] [--only NAME ...]

Steps of Llama3-8B's widths on random rollouts, at two or three sizes each.  "plan" is everything
between the tree and the first action, as in run/planning.py and run/step_run.py: segments of
several lengths, their plans, peaks of memory, policies and predicted seconds, then the order of
one rank's messages and the places of its payloads.  "next" is the same for a second step like the
first, which takes its lengths.  "trees" is what reads the tokens.  The exponents are the slopes of
log(plan) and log(next) over log(size): 1 where the time is proportional.  Times are of one core
(`time.process_time`); Python's collector is off, as it is in a job while a step is planned.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.measure.byte_meter import to_bits
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.lab.rl.baseline import PACK_TOKENS, pack_sizes
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import FLOPS_PER_SECOND
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.layer_numbers import Payload
from megatron_prefix.plan.memory import Footprint
from megatron_prefix.plan.memory_policy import Rates, automatic
from megatron_prefix.plan.prediction import heaviest_stock_plan, limit_of, predict
from megatron_prefix.plan.sizes import StageBytes
from megatron_prefix.plan.step_planner import Forecast, StepPlanner
from megatron_prefix.plan.timetable import message_gaps
from megatron_prefix.run.step_reader import uncollected
from megatron_prefix.tree import Forest, Pairs, TreeOptions, Tries, find_shared
from megatron_prefix.tree.payload_map import payload_map

Rollouts = list[Pairs]


def groups_of(
    num: int, seed: int = 0, prompt: int = 1024, mean: int = 400, size: int = 8
) -> Rollouts:
    """So many rollouts in groups of one prompt; responses are half to one and a half `mean`."""
    draw = np.random.default_rng(seed)
    rollouts = []
    for number in range(num):
        if number % size == 0:
            shared = draw.integers(0, 100_000, prompt, dtype=np.int32)
        response = draw.integers(0, 100_000, draw.integers(mean // 2, 3 * mean // 2), np.int32)
        tokens = np.concatenate([shared, response])
        rollouts.append(Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= prompt - 1))
    return rollouts


def agents_of(
    num: int, seed: int = 0, turns: int = 100, prompt: int = 2048, turn: int = 100
) -> Rollouts:
    """So many trajectories. Every turn is a rollout: all turns before it, and as many tokens of
    thoughts again, which later turns do not see."""
    draw = np.random.default_rng(seed)
    rollouts = []
    for _ in range(num):
        history = draw.integers(0, 100_000, prompt + turn * turns, dtype=np.int32)
        for number in range(turns):
            end = prompt + turn * number
            thoughts = draw.integers(0, 100_000, turn, dtype=np.int32)
            tokens = np.concatenate([history[:end], thoughts])
            rollouts.append(Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= end - 1))
    return rollouts


@dataclass(frozen=True)
class Case:
    """A kind of step.

    Attributes:
        name: printed.
        sizes: first numbers that `rollouts` takes; the second is a seed.
        pack: most positions of the trainer's microbatch; 0: one rollout each.
        options: of PrefixConfig.
    """

    name: str
    sizes: tuple[int, ...]
    pp: int = 1
    vpp: int = 1
    pack: int = PACK_TOKENS
    rollouts: Callable[[int, int], Rollouts] = groups_of
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("PP8, packs of 16,384", (1024, 4096, 16384), pp=8),
    Case("PP8, one rollout a microbatch", (256, 1024, 4096), pp=8, pack=0),
    Case("PP4, agents of 100 turns", (4, 16, 64), pp=4, rollouts=agents_of),
    Case("PP8 x VPP4, packs of 16,384", (256, 1024, 4096), pp=8, vpp=4),
    Case("PP32, packs of 16,384", (1024, 4096), pp=32),
    Case("one rank, packs of 16,384", (4096, 16384, 65536)),
    Case("PP4, chunks auto", (128, 512, 2048), pp=4, options={"chunk_tokens": "auto"},
         rollouts=partial(groups_of, prompt=8192, mean=1024)),
)  # fmt: skip


class Row(NamedTuple):
    """What planning a step took, in processor seconds, and what was planned."""

    trees: float
    plan: float
    step: float
    tokens: int
    segments: int
    actions: int
    speedup: float


def footprint_for(pp: int, vpp: int) -> Footprint:
    """Llama3-8B as a job would have measured it, by the lab's prediction."""
    spec = resolve("llama3-8b")
    numbers = footprint_of(spec, Execution(num_stages=pp * vpp))
    stages = []
    for stage in range(pp * vpp):
        ends = stage == 0, stage == pp * vpp - 1
        inner, wave, scored = (
            numbers.kept("retain", is_inner, read, *ends)
            for is_inner, read in ((True, 0.0), (False, 0.0), (False, 1.0))
        )
        row = (inner, wave, scored - wave, 0.0, numbers.temporary, 0.0)
        stages.append(StageBytes(*map(to_bits, row)))
    payloads = tuple(
        tuple(Payload(of.form, of.values, of.gradients) for of in stage)
        for stage in numbers.payloads
    )
    layers = max(1, spec.num_layers // (pp * vpp))
    return Footprint(tuple(stages), payloads, numbers.stage_input, layers, act=numbers.act * layers)


class Planner:
    """Plans steps of a case as mode "auto" does."""

    def __init__(self, case: Case) -> None:
        spec = resolve("llama3-8b")
        self.case, self.cost = case, cost_of(spec)
        self.times = self.cost.in_seconds(
            FLOPS_PER_SECOND["cuda"], spec.num_layers, case.pp, case.vpp
        )
        self.footprint = footprint_for(case.pp, case.vpp)
        self.static = 6.0 * spec.parameters() / case.pp
        joins = case.pp * case.vpp == 1
        self.steps = StepPlanner(
            PrefixConfig(**case.options), self.times, 1, case.pp, case.vpp, None, joins=joins
        )
        self.trees = 0.0

    def find(self, rollouts: Sequence[Pairs], options: TreeOptions) -> Tries:
        """Finds what is shared, and counts the time as that of trees."""
        self.trees -= time.process_time()
        shared = find_shared(rollouts, options=options)
        self.trees += time.process_time()
        return shared

    def forecast(self, forest: Forest, owners: Sequence[int], plan: Plan) -> Forecast:
        """As in run/planning.py and run/execute/memory_control.py."""
        stock = heaviest_stock_plan(forest, [owners], self.case.pp, self.case.vpp)
        highest = max(memory.peak for memory in self.footprint.peaks(stock))
        limit = limit_of(highest, self.static)
        policies = automatic(plan, self.footprint, self.cost, Rates(1.0, 1.0), limit, False)
        plan = replace(plan, policies=policies)
        peak = max(memory.peak for memory in self.footprint.peaks(plan))
        predicted = predict(self.times, forest, owners, plan)
        return Forecast(plan, plan, peak, limit, predicted, not any(policies))

    def plan(self, rollouts: Rollouts) -> Row:
        """Plans one step of rollouts, whose microbatches follow one another."""
        sizes = pack_sizes([len(r) for r in rollouts], self.case.pack) if self.case.pack else None
        owners = [n for n, size in enumerate(sizes or [1] * len(rollouts)) for _ in range(size)]
        self.trees, begin = 0.0, time.process_time()

        def judge(joint: JointForest, plan: Plan) -> Forecast:
            return self.forecast(joint.forest, owners, plan)

        _, forest = self.steps.build(rollouts, owners, judge, self.find)
        forecast = self.steps.fitting(JointForest.alone(forest, owners), judge)
        plan = forecast.plan
        for chunk in range(plan.num_chunks):
            payload_map(plan.segments, plan.actions_of(0, chunk))
        if plan.num_ranks > 1:
            message_gaps(plan, 0)
        took = time.process_time() - begin - self.trees
        return Row(
            self.trees, took, forecast.prediction.prefix_seconds, forest.raw_tokens,
            len(plan.segments), sum(map(len, plan.programs)), forecast.prediction.speedup,
        )  # fmt: skip


def rows(case: Case, sizes: Sequence[int]) -> Iterator[tuple[Row, Row]]:
    """A step of each size, and a second one like it."""
    for size in sizes:
        planner = Planner(case)
        yield planner.plan(case.rollouts(size, 0)), planner.plan(case.rollouts(size, 1))


def slope(pairs: Sequence[tuple[float, float]]) -> float:
    """The exponent of y in x, by least squares of their logarithms."""
    x, y = np.log(np.array(pairs).T)
    return float(np.polyfit(x, y, 1)[0]) if np.ptp(x) else math.nan


def show(case: Case, sizes: Sequence[int]) -> None:
    """Prints the case's rows as they come, and the exponents."""
    every = []
    for size, (row, following) in zip(sizes, rows(case, sizes), strict=True):
        every.append((size, row.plan, following.plan))
        print(
            f"{case.name:32} {size:7,} {row.tokens:11,} {row.segments:6,} {row.actions:8,}"
            f" {row.trees:7.2f} {row.plan:7.2f} {row.step:8.2f} {row.plan / row.step:7.1%}"
            f" {following.plan:7.2f} {following.plan / following.step:7.1%} {row.speedup:6.2f}",
            flush=True,
        )
    if len(every) > 1:
        first, second = (slope([(row[0], row[place]) for row in every]) for place in (1, 2))
        print(f"{'':32} exponents {first:.2f}, {second:.2f}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the two smallest sizes")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="cases whose names have one of these"
    )
    args = parser.parse_args()
    print(
        f"{'step':32} {'size':>7} {'tokens':>11} {'segm.':>6} {'actions':>8} {'trees':>7}"
        f" {'plan':>7} {'step s':>8} {'share':>7} {'next':>7} {'share':>7} {'speed':>6}"
    )
    with uncollected():
        for case in CASES:
            if any(text in case.name for text in args.only):
                show(case, case.sizes[:2] if args.quick else case.sizes)


if __name__ == "__main__":
    main()
