"""Counts the files and functions of the package that a step of the schedule passes through.

    python -m benchmarks.step_files
    python -m benchmarks.step_files --config hybrid-delta --list

One rank makes training steps of a config of `benchmarks/step_trace.py`.  The first step reads the
model and tries its kernels; the second one is a step as any other.  A function counts once, and so
does every function inside it, by the line where it is defined; methods of one name in one file are
one name.  Lambdas and comprehensions do not count, nor do `STAND_INS`.  Like that file, this one is
copied into older checkouts as it is.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import step_trace

STAND_INS = ("cpu.py", "linear_kernels.py")
"""Files of functions that take the place of CUDA's on the CPU only."""

Seen = set[tuple[str, int, str]]
"""File below the package, line, and name."""


@contextlib.contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Notes every Python function of the package that is entered.

    Greenlets share the profile function of their thread (greenlet keeps traces and frames apart,
    and not this), so suspended forward steps count; a backward on a GPU has a thread of its own.
    """
    codes: set[Any] = set()

    def entered(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in codes:
            return
        codes.add(code)
        path = step_trace.in_package(code.co_filename)
        if path is None or Path(path).name in STAND_INS or code.co_name.startswith("<"):
            return
        seen.add((path, code.co_firstlineno, code.co_name))

    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _rank_main(rank: int, name: str, folder: str) -> None:
    """Steps of one rank; what each passed through goes into a file of the folder."""
    case = step_trace.CASES[name]
    steps: list[Seen] = [set(), set()]
    with step_trace.joined(case, rank, folder) as device:
        zero, step = step_trace.prepared(case, device)
        for seen in steps:
            zero()
            with watched(seen):
                step()
    found = [sorted(seen) for seen in steps]
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


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
