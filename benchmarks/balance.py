"""How evenly data-parallel ranks are loaded, by method of placement, on real rollouts.

For every file, kind of tree and number of ranks: the largest load over the mean, in forward FLOPs
of the rank's trees (the time of the slowest rank over that of perfect balance), and in brackets the
positions that all ranks compute, over the least of all methods.  Steps of a fixed number of groups
per rank are taken from the file one after the other, then the whole file as one step; figures of
steps are means.  "tokens / auto" is the largest load by raw tokens over that by "auto".

    python benchmarks/balance.py ../shared/data/{tau2_mixed,qmsum_tree}.jsonl.gz
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_prefix.lab.data.rollouts import Group, read_groups
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.placement import Placement, place
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.tree import TreeOptions

METHODS = ("round robin", "tokens", "greedy", "whole", "cut", "auto")


class Outcome(NamedTuple):
    """One method on one step."""

    imbalance: float
    largest: float
    executed: int
    cut: int
    seconds: float


def steps(groups: Sequence[Group], size: int) -> Iterator[Sequence[Group]]:
    """Whole steps of `size` groups."""
    for start in range(0, len(groups) - size + 1, size):
        yield groups[start : start + size]


def measure(
    groups: Sequence[Group], num_ranks: int, share: str, method: str, cost: CostModel
) -> Outcome:
    """Places one step."""
    options = TreeOptions(share=share)
    begin = time.perf_counter()
    if method == "round robin":
        dealt = tuple(tuple(groups[rank::num_ranks]) for rank in range(num_ranks))
        placed = Placement(dealt, method, cost, options)
    else:
        placed = place(groups, num_ranks, cost, options, method)
    seconds = time.perf_counter() - begin
    return Outcome(
        placed.imbalance, max(placed.costs), placed.executed_tokens, placed.num_cut, seconds
    )


def row(parts: Sequence[Sequence[Group]], num_ranks: int, share: str, cost: CostModel) -> str:
    """One line of the table: every method's imbalance, and its tokens against whole groups'."""
    found = {}
    for method in METHODS:
        outcomes = [measure(part, num_ranks, share, method, cost) for part in parts]
        found[method] = Outcome(
            *(statistics.mean(column) for column in zip(*outcomes, strict=True))
        )
    least = min(outcome.executed for outcome in found.values())
    cells = [
        f"{outcome.imbalance:.3f} (+{outcome.executed / least - 1:.1%})"
        for outcome in found.values()
    ]
    slowest = found["tokens"].largest / found["auto"].largest
    return " | ".join([*cells, f"{slowest:.3f}", f"{1e3 * found['auto'].seconds:.0f}"])


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rollouts", nargs="+", metavar="FILE", help="rollout files")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--model", default="llama3-8b", help="preset (default llama3-8b)")
    parser.add_argument(
        "--groups-per-rank", type=int, default=2, metavar="N", help="of a step (default 2)"
    )
    args = parser.parse_args()
    cost = cost_of(resolve(args.model))
    columns = ["set", "trees", "step", "ranks", *METHODS, "tokens / auto", "ms"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for path in args.rollouts:
        groups = list(read_groups(path))
        name = Path(path).name.partition(".")[0]
        for share in ("group", "batch"):
            for num_ranks in args.ranks:
                size = num_ranks * args.groups_per_rank
                for label, parts in (
                    (f"{size} groups", list(steps(groups, size))),
                    ("all", [groups]),
                ):
                    line = row(parts, num_ranks, share, cost)
                    print(f"| {name} | {share} | {label} | {num_ranks} | {line} |", flush=True)


if __name__ == "__main__":
    main()
