"""Counts the files and functions of the package that a step of the schedule passes through.

    python -m benchmarks.step_files
    python -m benchmarks.step_files --config hybrid-delta --list

One rank makes training steps of a config of `benchmarks/step_trace.py`.  The first step reads the
model and tries its kernels; the second one is a step as any other.  A function counts once, and so
does every function inside it, by the line where it is defined; methods of one name in one file are
one name.  Lambdas and comprehensions do not count, nor do `CPU_FILES`.  Like that file, this one is
copied into older checkouts as it is.
"""

from __future__ import annotations

import argparse
import collections
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import step_trace


def _rank_main(rank: int, name: str, folder: str) -> None:
    """Steps of one rank; what each passed through goes into a file of the folder."""
    case = step_trace.CASES[name]
    steps: list[step_trace.Entered] = [set(), set()]
    with step_trace.joined(case, rank, folder) as device, step_trace.stand_ins(case):
        zero, step = step_trace.prepared(case, device, folder)
        for entered in steps:
            zero()
            with step_trace.profiled(entered):
                step()
    functions = [sorted(entered) for entered in steps]
    Path(folder, f"{rank}.json").write_text(json.dumps(functions), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints how many files and functions each step of rank 0 passed through, and both together."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--config", default="dense", choices=step_trace.CASES, metavar="NAME",
        help=f"(default dense) one of {', '.join(step_trace.CASES)}",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the functions of every file")
    args = parser.parse_args(arguments)
    step_trace.imported()
    with tempfile.TemporaryDirectory() as folder:
        first, second = step_trace.on_ranks(_rank_main, args.config, folder)[0]
    both = sorted({tuple(one) for one in first + second})
    for name, found in (("first step", first), ("second step", second), ("both", both)):
        num_names = len({(path, function) for path, _, function in found})
        num_files = len({path for path, _, _ in found})
        print(f"{name}: {num_files} files, {len(found)} functions, {num_names} names")
    if args.list:
        names = collections.defaultdict(list)
        for path, line, function in second:
            names[path].append(f"{function}:{line}")
        for path, functions in sorted(names.items()):
            print(f"{path} ({len(functions)}): {', '.join(functions)}")


if __name__ == "__main__":
    main()
