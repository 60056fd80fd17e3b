"""Two checkouts timed in turn on one machine: is the second one slower?

    python -m benchmarks.alternate OLD NEW --rounds 12 -- python -m benchmarks.host_time

Runs a command in both folders, in an order that changes from round to round, and reads lines
`NAME: NUMBER ms ...` of its output, or the rows of what `megatron-prefix bench --json` prints. For
every name it prints both medians, the median of the rounds' ratios (new over old), and the bounds
between which that median is with 95 % confidence: by the order statistics of the ratios, which
assume nothing about how times spread. Exit code 1 if an upper bound is above --most.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LINE = re.compile(r"^(.*): ([0-9.]+) ms\b", re.M)


def times(folder: Path, command: Sequence[str]) -> dict[str, float]:
    """What a command prints in a folder, by name, in ms."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"{folder}: {' '.join(command)} ends with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    if not done.stdout.startswith("{"):
        return {name: float(number) for name, number in LINE.findall(done.stdout)}
    rows = json.loads(done.stdout)["rows"]
    return {f"{s} {row['name']}": row[f"{s}_ms"] for row in rows for s in ("stock", "prefix")}


def bounds(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which the median of what the ratios are drawn from is, with 95 % confidence.

    The number of values below the median is binomial; fewer than six ratios bound nothing.
    """
    ordered, num = sorted(ratios), len(ratios)
    chance, rank = 0.0, 0
    while rank < num // 2:
        chance += math.comb(num, rank) / 2**num
        if 2 * chance > 0.05:
            break
        rank += 1
    if not rank:  # five values or fewer do not bound it
        return -math.inf, math.inf
    return ordered[rank - 1], ordered[num - rank]


def main() -> None:
    """Prints a line a name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("old", type=Path, help="folder of the checkout before")
    parser.add_argument("new", type=Path, help="folder of the checkout now")
    parser.add_argument("--rounds", type=int, default=12, help="(default 12)")
    parser.add_argument("--most", type=float, default=1.02, help="upper bound (default 1.02)")
    parser.add_argument("command", nargs="+", help="behind --")
    args = parser.parse_args()
    folders = {"old": args.old.resolve(), "new": args.new.resolve()}
    rounds = []
    for number in range(args.rounds):
        order = ["old", "new"] if number % 2 else ["new", "old"]
        rounds.append({which: times(folders[which], args.command) for which in order})
        old, new = rounds[-1]["old"], rounds[-1]["new"]
        told = (f"{name} {new[name] / old[name]:.4f}" for name in old)
        print(f"round {number + 1}: {', '.join(told)}", file=sys.stderr, flush=True)
    worst = 0.0
    for name in rounds[0]["old"]:
        pairs = [(one["old"][name], one["new"][name]) for one in rounds]
        ratios = [new / old for old, new in pairs]
        low, high = bounds(ratios)
        before, now = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(
            f"{name}: {before:.3f} ms before, {now:.3f} now, ratio {statistics.median(ratios):.4f}"
            f" ({low:.4f} to {high:.4f}, {len(ratios)} rounds)"
        )
        if not name.startswith("stock"):
            worst = max(worst, high)
    sys.exit(worst > args.most)


if __name__ == "__main__":
    main()
