"""What ranks that share experts would lose if all of them cut one set of rounds.

    python -m benchmarks.lockstep_rounds FOLDER

Today each rank cuts rounds of its own, and segments that run together are aligned
(plan/joint_forest.py).  With common rounds, by the rank that has most in each, nothing would have
to be aligned.  For every set of rollouts in FOLDER (SET.jsonl.gz), 2 and 4 ranks, one and two
stages: simulated seconds of a step of Qwen3-30B-A3B as today, as today with prompts apart from
their suffixes, and in common rounds, with the ratios of both to the first; guessed prices, no limit
of memory.  On the CPU, no model is made.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group, read_groups
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.joint_forest import JointForest, joint_forest
from megatron_prefix.plan.prediction import Prediction, predict
from megatron_prefix.plan.step_planner import Forecast, StepPlanner
from megatron_prefix.tree.packing import MicrobatchRows

PACK_TOKENS, STEP_TOKENS = 16384, {"math_cot": 12500}
SETS = ("rag_hotpot_llm", "rag_musique", "tau2_mixed", "tau_airline", "gsm8k", "math_cot")
SPEC = resolve("qwen3-30b-a3b")
Sample = tuple[list[Any], list[int]]
"""A rank's rollouts, and the microbatch of each."""


def size(group: Group) -> int:
    """Tokens."""
    return sum(map(len, group.rollouts))


def first_step(groups: Iterator[Group], num_tokens: int) -> list[Group]:
    """The first groups of so many tokens, or all."""
    step: list[Group] = []
    while sum(map(size, step)) < num_tokens and (group := next(groups, None)) is not None:
        step.append(group)
    return step


def dealt(step: Sequence[Group], num_ranks: int) -> Iterator[Sample]:
    """By length, the longest first, to the rank that has least; packed in order."""
    ranks: list[list[Group]] = [[] for _ in range(num_ranks)]
    for group in sorted(step, key=size, reverse=True):
        min(ranks, key=lambda groups: sum(map(size, groups))).append(group)
    for groups in ranks:
        pairs, _ = pairs_of_groups(groups)
        microbatch_of, filled, number = [], 0, 0
        for rollout in pairs:
            if filled and filled + len(rollout) > PACK_TOKENS:
                filled, number = 0, number + 1
            filled += len(rollout)
            microbatch_of.append(number)
        yield pairs, microbatch_of


class Job:
    """Ranks that share experts, each with a step's rollouts."""

    def __init__(self, samples: Sequence[Sample], num_stages: int) -> None:
        self.samples, self.num_stages = samples, num_stages
        self.cost = cost_of(SPEC).in_seconds(4e14, SPEC.num_layers, num_stages)
        config = PrefixConfig(mode="auto")
        self.planner = StepPlanner(config, self.cost, 1, num_stages, 1, None, joins=True)

    def built(self, **options: Any) -> list[tuple[int, Any]]:
        """Each rank's choice for itself: the most positions in a segment, and its segments."""
        return [self.planner.build(*own, self._judge, **options) for own in self.samples]

    def at(self, length: int, **options: Any) -> JointForest:
        """Segments of all ranks together."""
        forests = [self.planner.build_at(length, *own, **options) for own in self.samples]
        return joint_forest(forests, [tuple(microbatch_of) for _, microbatch_of in self.samples])

    def seconds(self, joint: JointForest) -> float:
        """Of the step with the prefix schedule."""
        plan = replace(self.planner.plan(joint), segments=joint.union.segments)
        return self._predicted(joint, plan).prefix_seconds

    def _judge(self, joint: JointForest, plan: Plan) -> Forecast:
        return Forecast(plan, plan, 0.0, 0.0, self._predicted(joint, plan), retains=True)

    def _predicted(self, joint: JointForest, plan: Plan) -> Prediction:
        owners, ranks = joint.union_microbatch_of, joint.num_pipelines
        return predict(self.cost, joint.union, owners, plan, num_pipelines=ranks)


def row(job: Job) -> str:
    """Seconds as today, apart, and in common rounds."""
    shortest = min(length for length, _ in job.built())
    today = job.at(shortest)
    apart = job.at(shortest, joins=False)
    today = apart if today.mixed else today
    alone = job.built(joins=False)
    each = zip(alone, job.samples, strict=True)
    rows = MicrobatchRows.most(MicrobatchRows.of(forest, own[1]) for (_, forest), own in each)
    common = job.at(min(length for length, _ in alone), rows=rows)
    times = [job.seconds(joint) for joint in (today, apart, common)]
    ratios = [time / times[0] for time in times[1:]]
    return "  ".join(f"{time:6.3f}" for time in times) + f"  x{ratios[0]:.3f}  x{ratios[1]:.3f}"


def main(folder: Path) -> None:
    """Prints a row a set and layout."""
    print("stages  set              ranks   today   apart  common rounds")
    for num_stages, name, num_ranks in itertools.product((1, 2), SETS, (2, 4)):
        groups = iter(read_groups(str(folder / f"{name}.jsonl.gz")))
        step = first_step(groups, STEP_TOKENS.get(name, 100000) * num_ranks)
        job = Job([*dealt(step, num_ranks)], num_stages)
        print(f"{num_stages:6d}  {name:16s} {num_ranks:5d}  {row(job)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
