"""How far two runs of a training loop are apart, by the files that on_cpu.py wrote.

    python -m benchmarks.trainers.trajectories STOCK PREFIX

STOCK and PREFIX are what `STEPS` was in the two runs: each has a file a rank. Prints a row for
docs/results.md; the exit code is 1 where the policy does not allow the difference.
"""

import glob
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_prefix.lab.numerics import tolerance


class Distance(NamedTuple):
    """Largest relative differences of all steps; infinite where one is missing or no number."""

    losses: float
    gradient_norms: float


def distance(found, expected):
    """Of two runs' steps on one rank: dicts with `losses`, by name, and `grad_norm`."""
    losses = norms = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        if ours["losses"].keys() != theirs["losses"].keys():
            return Distance(math.inf, math.inf)
        for name, value in theirs["losses"].items():
            losses = max(losses, _relative(ours["losses"][name], value))
        norms = max(norms, _relative(ours["grad_norm"], theirs["grad_norm"]))
    return Distance(losses, norms)


def _relative(found, expected):
    difference = abs(found - expected) / abs(expected)
    return difference if math.isfinite(difference) else math.inf


def read(prefix):
    """The lines of every rank."""
    paths = glob.glob(f"{glob.escape(prefix)}.[0-9]*")
    paths.sort(key=lambda path: int(path.rpartition(".")[2]))
    return [[json.loads(line) for line in Path(path).open(encoding="utf-8")] for path in paths]


def main():
    """Compares what the command line names."""
    stock, prefix = (read(name) for name in sys.argv[1:])
    if not stock or len(stock) != len(prefix):
        print(f"{len(stock)} and {len(prefix)} ranks: nothing to compare", file=sys.stderr)
        return 2
    pairs = [(a[:-1], b[:-1]) for a, b in zip(prefix, stock, strict=True)]
    found = [distance(*pair) for pair in pairs]
    losses, norms = (max(values) for values in zip(*found, strict=True))
    steps = [step for mine, _ in pairs for step in mine if step.get("raw")]
    tokens = max((step["raw"] for step in steps), default=1)
    allowed = tolerance(torch.float32, tokens)
    part = sum(step["executed"] for step in steps) / max(sum(step["raw"] for step in steps), 1)
    equal = "bitwise equal" if [a[-1] for a in prefix] == [b[-1] for b in stock] else "differ"
    print(f"| {len(stock)} ranks, {len(pairs[0][0])} steps | {losses:.1e} | {norms:.1e} |", end="")
    print(f" {part:.2f} | allowed {allowed:.1e}; parameters {equal}")
    return int(not max(losses, norms) <= allowed)


if __name__ == "__main__":
    sys.exit(main())
