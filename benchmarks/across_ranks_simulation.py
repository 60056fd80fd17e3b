"""A simulation of steps whose prompts run once in the job: what that gives, and what messages cost.

    python benchmarks/across_ranks_simulation.py ../shared/data/{rag_musique,gsm8k}.jsonl.gz

Nothing is measured. Every file is one step, dealt to data-parallel ranks by length or at random;
times are those that the cost model guesses for one GPU a rank (plan/cost.py), bf16, packs of 16,384
tokens, and messages take their bytes over a bandwidth, one after another on every rank
(lab/plans/job.py). A row is one dealing:

- alone: speedup of the slowest rank over the stock schedule, if each rank shares alone;
- tokens: speedup by sharing across ranks over that, as tokens allow it (`plan --dp`);
- all hides: the same with free messages, waiting for other ranks included;
- nothing hides: all ranks exchange at once, and no message hides behind any computation: the rank
  with most of them, sent and received, adds their time;
- in order: messages as plans have them, in one order of all ranks, each holding up the next ones
  of both of its ranks; they hide behind computation;
- received: tokens of the mean and of the largest rank;
- exposed: milliseconds that messages add to the step with free ones, if nothing hides and in order.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group, read_groups
from megatron_prefix.lab.models.presets import ModelSpec, resolve
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.plans.dealt_tokens import dealt_tokens
from megatron_prefix.lab.plans.job_plan import JobPlan, job_plan, message_seconds, rank_cost
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.lab.rl.baseline import PACK_TOKENS, pack_sizes
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.plan.cost import CostModel, features, stock_work
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.tree import Pairs, TreeOptions, build


class Outcome(NamedTuple):
    """Seconds of a step whose prompts cross ranks, as simulated and if nothing hides."""

    simulated: float
    unhidden: float


class Row(NamedTuple):
    """One dealing; seconds of the slowest rank."""

    stock: float
    alone: float
    free: float
    by_rate: list[Outcome]
    received: Sequence[int]
    tokens: float


def packs(rollouts: Sequence[Pairs]) -> list[int]:
    """The microbatch of each rollout."""
    sizes = pack_sizes([*map(len, rollouts)], PACK_TOKENS)
    return [number for number, size in enumerate(sizes) for _ in range(size)]


def stock_and_alone(
    rollouts: Sequence[Pairs], cost: CostModel, options: TreeOptions
) -> tuple[float, float]:
    """Seconds of one rank that shares nothing, and of one that shares alone."""
    microbatch_of = packs(rollouts)
    forest = build(rollouts, options=options, microbatch_of=microbatch_of)
    stock = cost.of(features(stock_work(forest, microbatch_of), "FB"))
    plan = make_plan(forest, microbatches=microbatch_of)
    return stock, simulate(plan, cost=cost.segment).makespan


def message_time(job: JobPlan, seconds: tuple[float, float]) -> float:
    """Of the rank with most messages: it gets what it receives, and sends gradients of it back;
    and of what it sends it gets gradients."""
    payload, gradients = seconds
    both = zip(job.received_tokens, job.sent_tokens, strict=True)
    return max(sum(ways) * (payload + gradients) for ways in both)


def simulated(
    groups: Sequence[Group], spec: ModelSpec, num_ranks: int, how: str, rates: Sequence[float]
) -> Row:
    """One dealing of a step."""
    layout, config = Layout(dp=num_ranks), PrefixConfig(mode="on")
    options, cost = config.tree_options(1), rank_cost(spec, layout)
    ranks = deal(groups, spec, layout, config, how, stock=False, seed=1)
    pairs = [pairs_of_groups(some)[0] for some in ranks]
    alone = [stock_and_alone(one, cost, options) for one in pairs]
    job = job_plan(pairs, [*map(packs, pairs)], options)
    free = job.timeline(cost.segment).makespan
    by_rate = []
    for rate in rates:
        seconds = message_seconds(spec, layout, 1e9 * rate)
        unhidden = free + message_time(job, seconds)
        by_rate.append(Outcome(job.timeline(cost.segment, seconds).makespan, unhidden))
    tokens = dealt_tokens(ranks, options, spec)
    bound = tokens.speedup_across_ranks / tokens.speedup
    stock, shared = map(max, zip(*alone, strict=True))
    return Row(stock, shared, free, by_rate, job.received_tokens, bound)


def cells(row: Row) -> list[str]:
    """Of the table."""
    times = [f"{row.alone / other:.2f}, {row.alone / one:.2f}" for one, other in row.by_rate]
    exposed = [
        f"{1e3 * (other - row.free):,.0f}, {1e3 * (one - row.free):,.0f}"
        for one, other in row.by_rate
    ]
    step = f"{1e3 * row.free:,.0f}"
    received = f"{statistics.mean(row.received):,.0f}, {max(row.received):,}"
    ratios = [f"{row.stock / row.alone:.2f}", f"{row.tokens:.2f}", f"{row.alone / row.free:.2f}"]
    return [*ratios, *times, received, step, *exposed]


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rollouts", nargs="+", metavar="FILE", help="rollout files")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64], metavar="N")
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 400], metavar="GB/s")
    parser.add_argument("--model", default="llama3-8b", help="preset (default llama3-8b)")
    args = parser.parse_args()
    at = [f"{rate:g} GB/s: nothing hides, in order" for rate in args.rates]
    exposed = [f"exposed, {rate:g} GB/s" for rate in args.rates]
    titles = ["rollouts, dealt", "DP", "alone", "tokens", "all hides", *at]
    titles += ["received", "step, ms", *exposed]
    print("| " + " | ".join(titles) + " |")
    print("|---" * len(titles) + "|")
    for path in args.rollouts:
        groups, name = [*read_groups(path)], Path(path).name.partition(".")[0]
        for how in ("length", "random"):
            for num in args.ranks:
                row = simulated(groups, resolve(args.model), num, how, args.rates)
                print(f"| {name}, {how} | {num} | {' | '.join(cells(row))} |", flush=True)


if __name__ == "__main__":
    main()
