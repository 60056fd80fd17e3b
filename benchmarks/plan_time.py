"""Time of planning a step, and of finding out that nothing is shared.

    python benchmarks/plan_time.py

Host time of one core: median of several runs on rollouts of random tokens. "planned" is everything
that mode auto does with a step's tokens: the prefilter, the tree, the plan and the prediction;
"nothing shared" ends after the prefilter. The samples are cut out of the step's columns as in
run/read/step.py, which is part of both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.gate import decide, without_sharing
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.prediction import predict
from megatron_prefix.plan.step_planner import StepPlanner
from megatron_prefix.run.calls import CallLayout
from megatron_prefix.run.read.read_calls import CallTokens, ReadCalls
from megatron_prefix.run.read.step import read_step

COST = cost_of(resolve("qwen3-8b"))
GROUPS = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def columns(num: int, tokens: int, prompt: int, num_groups: int) -> CallTokens:
    """One rollout a microbatch; rollouts of a group begin with one prompt."""
    draw = np.random.default_rng(1)
    table = draw.integers(0, 150_000, (num, tokens + 1))
    for first in range(0, num, num // num_groups if num_groups else num):
        if num_groups:
            table[first : first + num // num_groups, :prompt] = table[first, :prompt]
    trained = np.broadcast_to(np.arange(tokens) >= prompt - 1, (num, tokens)).astype(np.int64)
    layouts = [CallLayout((tokens,), True)] * num
    inputs, labels = table[:, :-1].reshape(-1), table[:, 1:].reshape(-1)
    return CallTokens(layouts, inputs, labels, trained.reshape(-1), None)


def planned(known: CallTokens, num_ranks: int, chunk_tokens: int) -> bool:
    """What mode auto does before it chooses a schedule; whether that is the prefix schedule."""
    config = PrefixConfig(mode="auto", chunk_tokens=chunk_tokens)
    planner = StepPlanner(config, COST, 1, num_ranks, 1, None)
    groups = SimpleNamespace(pp=GROUPS, cp=GROUPS)
    step, problem = read_step(
        ReadCalls(known, None), groups,
        lambda samples, microbatches: planner.build(samples, microbatches)[1],
        torch.device("cpu"), lambda samples: without_sharing(config, samples or (), 1),
    )  # fmt: skip
    if problem is not None or step is None:
        raise problem or RuntimeError("no step")
    if step.unshared:
        return False
    joint = joint_forest([step.forest], [step.microbatch_of])
    plan = planner.plan(joint)
    times = COST.in_seconds(4e14, 36, num_ranks)
    predicted = predict(times, joint.union, joint.union_microbatch_of, plan)
    return decide(config, predicted.speedup).share


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median of several calls, after one that is not timed."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def main() -> None:
    """Prints one line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    repeats = parser.parse_args().repeats
    shared, alone = columns(1000, 2000, 1000, 100), columns(1000, 2000, 1000, 0)
    print("1,000 rollouts of 2,000 tokens")
    for name, known, ranks, chunk in (
        ("planned, 100 groups with prompts of 1,000, one stage", shared, 1, 0),
        ("planned, the same, four stages, chunks of 512", shared, 4, 512),
        ("nothing shared", alone, 1, 0),
    ):
        took = seconds(lambda: planned(known, ranks, chunk), repeats)  # noqa: B023
        print(f"{1e3 * took:8.1f} ms  {name}")


if __name__ == "__main__":
    main()
