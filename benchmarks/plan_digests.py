"""What two commits plan for the same random steps.

    python -m benchmarks.plan_digests write FILE [--number N]
    python -m benchmarks.plan_digests compare FILE OTHER

A line a step: hashes of the plan, of the order of messages, of the policies and of every payload
map, and the bytes of every rank's peak.  Trees, pipelines, model chunks, microbatches, bounds,
context-parallel parts, kinds of layers, layers on the host, measured bytes and limits are random;
policies are searched for in a quarter of the steps, every eighth has prompts that cross
data-parallel ranks, every tenth is planned from its rollouts with a judge, and some of these choose
lengths of chunks.  `compare` ends with 1 where a hash differs, or bytes do: by more than 1e-8 of
them and 1e-5 of one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.across.exchange_memory import ExchangeMemory
from megatron_prefix.plan.actions import Plan, policies
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.layer_numbers import Payload
from megatron_prefix.plan.memory import Footprint, RankMemory
from megatron_prefix.plan.memory_policy import Rates, automatic
from megatron_prefix.plan.planner import best_plan, make_plan
from megatron_prefix.plan.prediction import heaviest_stock_plan, predict
from megatron_prefix.plan.sizes import StageBytes
from megatron_prefix.plan.step_planner import Forecast, StepPlanner
from megatron_prefix.plan.timetable import timetable
from megatron_prefix.tree import TreeOptions
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness.joint_jobs import Sizes, dealt, forests_of, random_case
from tests.harness.trees import flat_rollouts

FORMS = (Form.POSITIONS, Form.SPANS, Form("positions", 5), Form("positions", 40))
COST = CostModel.of_flops(1.0, 3.0, 0.01)
Entry = dict[str, Any]


def digest(value: object) -> str:
    """A short hash of a value, by its text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def random_footprint(rng: random.Random, plan: Plan, *, crosses: bool) -> Footprint:
    """Bytes of a model; half of them whole, as those that were measured nearly are."""

    def number(most: float) -> float:
        return float(rng.randint(0, int(most))) if is_whole else rng.uniform(0.0, most)

    is_whole = rng.random() < 0.5
    stages = tuple(
        StageBytes(*map(number, (900.0, 900.0, 300.0, 500.0, 400.0, 3.0)))
        for _ in range(plan.num_stages)
    )
    kinds = [
        Payload(form, number(60.0), number(90.0))
        for form in rng.choices(FORMS, (6, 2, 1, 1), k=rng.randint(1, 3))
    ]
    layers = rng.randint(1, 4)
    payloads = tuple(tuple(rng.choices(kinds, k=layers)) for _ in range(plan.num_stages))
    halves = all(span.padded % 2 == 0 for segment in plan.segments for span in segment.spans)
    parts = 2 if halves and rng.random() < 0.5 else 1
    return Footprint(
        stages, payloads, number(50.0), layers, parts, rng.choice((1, parts)),
        rng.choice((0.0, number(200.0))), rng.choice((0, 0, 0, 1, 2)), number(20.0), number(20.0),
        buffers=ExchangeMemory if crosses or rng.random() < 0.2 else None,
    )  # fmt: skip


def of_peaks(memory: Sequence[RankMemory]) -> tuple[str, list[float]]:
    """What is at the peaks as a hash, and the bytes."""
    names = [(str(of_rank.action), [index for index, _ in of_rank.held]) for of_rank in memory]
    numbers = [
        number
        for of_rank in memory
        for number in (
            of_rank.peak, of_rank.kept, of_rank.cache, of_rank.moment, of_rank.cache_peak,
            of_rank.cache_staged, of_rank.staged, of_rank.exchanged,
            *(size for _, size in of_rank.held),
        )
    ]  # fmt: skip
    return digest(names), numbers


def of_memory(rng: random.Random, plan: Plan, *, crosses: bool, searches: bool) -> Entry:
    """Peaks with random policies, and where it `searches` policies for random limits."""
    footprint = random_footprint(rng, plan, crosses=crosses)
    entry: Entry = {"names": [], "bytes": [], "policies": []}
    kinds = ("retain", "recompute", "offload", "recompute_act")
    for policy in rng.sample(kinds, 1 + searches):
        names, numbers = of_peaks(
            footprint.peaks(replace(plan, policies=policies(plan.segments, policy)))
        )
        entry["names"].append(names)
        entry["bytes"] += numbers
    for share in (0.97, rng.uniform(0.2, 0.95)) if searches else ():
        highest = max(memory.peak for memory in footprint.peaks(replace(plan, policies=())))
        may_offload, rates = rng.random() < 0.5, Rates(1e3, rng.choice((1e3, 1e6)))
        chosen = automatic(plan, footprint, COST, rates, share * highest, may_offload)
        names, numbers = of_peaks(footprint.peaks(replace(plan, policies=chosen)))
        entry["policies"].append(digest(chosen))
        entry["names"].append(names)
        entry["bytes"] += numbers
    maps = []
    for rank, chunk in itertools.product(range(plan.num_ranks), range(plan.num_chunks)):
        parts = footprint.parts, footprint.shares
        found = payload_map(plan.segments, plan.actions_of(rank, chunk), *parts, FORMS)
        tails = sorted(found.tails.items(), key=lambda item: item[0].last or 0)
        maps.append(digest([replace(found, tails={}), tails]))
    return {**entry, "maps": digest(maps)}


def of_crossing(rng: random.Random) -> tuple[Plan, list[int]]:
    """A plan of ranks with prompts that cross them."""
    sizes = Sizes(rng.choice((2, 3)))
    ranks = [*dealt(rng, sizes)]
    options = TreeOptions(
        min_gain=0, share="batch", segment_tokens=rng.choice((0, 40, 100)),
        chunk_tokens=rng.choice((0, 0, 12)),
    )  # fmt: skip
    owners = [[number // 2 for number in range(len(rank))] for rank in ranks]
    forests = forests_of(ranks, owners, options, ordered=False)
    num = rng.choice((1, len(ranks)))
    joint = joint_forest(forests[:num], owners[:num])
    microbatches = [*joint.union_microbatch_of]
    stages, chunks = rng.choice(((1, 1), (2, 1), (3, 2)))
    plan = best_plan(joint.union, stages, num_chunks=chunks, microbatches=microbatches)
    return replace(plan, segments=joint.forest.segments, sent=joint.sent), microbatches


def of_rollouts(rng: random.Random) -> Entry:
    """A step planned as run/planning.py does, from rollouts."""
    rollouts, _ = flat_rollouts(
        rng.randint(100, 3000), rng.randint(20, 900), rng.randint(1, 6), rng.randint(1, 12)
    )
    size = rng.randint(1, 6)
    owners = [number // size for number in range(len(rollouts))]
    stages, chunks = rng.choice(((1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 3)))
    config = PrefixConfig(
        segment_tokens=rng.choice(("auto", 4096, 8192)),
        chunk_tokens="auto" if rng.random() < 0.3 else rng.choice((0, 0, 512)),
    )
    times = replace(COST, prices=(1e-6, 3e-6, 1e-9, 1e-3, 1e-4, 0.0) * 2)
    planner = StepPlanner(
        config, times, 1, stages, chunks, None, joins=stages * chunks == 1 and rng.random() < 0.7
    )
    example = make_plan(planner.build(rollouts, owners)[1], stages, num_chunks=chunks)
    footprint = random_footprint(rng, example, crosses=False)
    share = rng.uniform(0.3, 1.5)

    def judge(joint: Any, plan: Plan) -> Forecast:
        stock = heaviest_stock_plan(joint.union, joint.microbatches_of, stages, chunks)
        limit = share * max(memory.peak for memory in footprint.peaks(stock))
        chosen = automatic(plan, footprint, COST, Rates(1e3, 1e6), limit, False)
        plan = replace(plan, policies=chosen)
        peak = max(memory.peak for memory in footprint.peaks(plan))
        times_of = predict(times, joint.union, joint.union_microbatch_of, plan)
        return Forecast(plan, plan, peak, limit, times_of, not any(chosen))

    length, forest = planner.build(rollouts, owners, judge)
    forecast = planner.fitting(joint_forest([forest], [owners]), judge)
    numbers = [forecast.peak, forecast.limit, *forecast.prediction[2:]]
    return {"plan": digest([length, forecast.plan]), "bytes": numbers}


def entry_of(number: int) -> Entry:
    """What is planned for a random step."""
    rng = random.Random(number)
    if number % 10 == 9:
        return of_rollouts(rng)
    if crosses := number % 8 == 7:
        plan, _ = of_crossing(rng)
    else:
        forest, num_ranks, options = random_case(rng)
        if number % 2:
            del options["max_live_positions"]
            options["run_ahead"] = options["run_ahead"] or 2
            plan = best_plan(forest, num_ranks, **options)
        else:
            plan = make_plan(forest, num_ranks, **options)
    order = digest(timetable(plan)) if not crosses else ""
    memory = of_memory(rng, plan, crosses=crosses, searches=number % 8 in (4, 7))
    return {"plan": digest(plan), "order": order, **memory}


def alike(left: Sequence[float], right: Sequence[float]) -> bool:
    """Whether numbers differ by rounding at most."""
    return len(left) == len(right) and all(
        math.isclose(a, b, rel_tol=1e-8, abs_tol=1e-5) for a, b in zip(left, right, strict=True)
    )


def differs(first: Entry, second: Entry) -> str:
    """What differs, or nothing."""
    for name in first.keys() | second.keys():
        left, right = first.get(name), second.get(name)
        if name != "bytes" and left != right:
            return name
        if name == "bytes" and not alike(left or (), right or ()):
            return name
    return ""


def main() -> int:
    """Writes or compares; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("write", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--number", type=int, default=5000, help="of steps (default 5,000)")
    parser.add_argument("--part", type=int, default=0, help="of --parts, counted from 0")
    parser.add_argument("--parts", type=int, default=1)
    args = parser.parse_args()
    if args.verb == "write":
        with args.files[0].open("w", encoding="utf-8") as file:
            for number in range(args.part, args.number, args.parts):
                file.write(json.dumps([number, entry_of(number)]) + "\n")
        return 0
    before, after = (
        dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        for path in args.files
    )
    wrong = {n: name for n in before if (name := differs(before[n], after.get(n, {})))}
    print(f"{len(before):,} steps, {len(wrong):,} differ: {dict(list(wrong.items())[:20])}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
