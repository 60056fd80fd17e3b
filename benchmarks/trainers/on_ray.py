"""A trainer's own program with Ray on this machine's CPU, in two modes that are compared."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TIME_LIMIT_S = 900
WORKERS = 2
TOLD = re.compile(
    r"megatron_prefix [\d.]+ in .*|prefix sharing is .*|stock schedule for this step: .*"
    r"|of \d+ tokens of this step .*"
)
"""What the package logs of a run."""


class StandIn(NamedTuple):
    """What does not run as on a user's machine, a line of the trainer's page.

    Attributes:
        what: of the trainer or of what it needs.
        instead: what runs in its place.
        why: there is no way around it.
    """

    what: str
    instead: str
    why: str


def table(stand_ins: Sequence[StandIn]) -> str:
    """The table of a trainer's page."""
    rows = [f"| {' | '.join(one)} |\n" for one in stand_ins]
    return "".join(["| what | instead | why |\n", "|---|---|---|\n", *rows])


def options(hook: str) -> dict[str, object]:
    """What `ray.init` gets: a Ray of its own, on the loopback interface.

    Args:
        hook: the function that every worker calls first, "module.function".
    """
    return {
        "num_cpus": 4, "num_gpus": WORKERS, "include_dashboard": False,
        "object_store_memory": 100 << 20, "_node_ip_address": "127.0.0.1",
        "runtime_env": {"worker_process_setup_hook": hook},
    }  # fmt: skip


def run_script(script: Path, hook: str) -> None:
    """Runs a program that expects a Ray that is there already."""
    import ray

    ray.init(**options(hook))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        ray.shutdown()


def launched(command: Sequence[str], folders: Sequence[Path], environ: Mapping[str, str]) -> str:
    """What a command prints.

    Args:
        folders: where its modules are, before those of this environment.

    Raises:
        SystemExit: it fails, or takes too long; with the end of what it printed.
    """
    path = os.pathsep.join(map(str, [Path(__file__).parents[2], *folders]))
    found = subprocess.run(
        [sys.executable, "-W", "ignore", *command], timeout=TIME_LIMIT_S, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environ},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if found.returncode:
        raise SystemExit(found.stdout[-8000:])
    return found.stdout


def compared(runs: Mapping[str, Sequence[Mapping[str, float]]], limit: float) -> int:
    """Prints the figures of every mode's steps, and how far they are from the first mode's.

    Args:
        limit: of a difference, relative to the figure, or to 1 where that is less; a gradient norm
            counts as it is.

    Returns:
        0; 1 where a difference is larger, or steps are missing.
    """
    first, *others = runs
    names = list(runs[first][0])
    print("| mode | step |", " | ".join(names), "| furthest |")
    worst, complete = 0.0, len({len(steps) for steps in runs.values()}) == 1
    for mode in (first, *others):
        for number, (stock, step) in enumerate(zip(runs[first], runs[mode], strict=False)):
            apart = max(
                abs(step[name] - stock[name])
                / (abs(stock[name]) if "grad_norm" in name else max(abs(stock[name]), 1.0))
                for name in names
            )
            worst = max(worst, apart)
            figures = " | ".join(f"{step[name]:.7g}" for name in names)
            print(f"| {mode} | {number} | {figures} | {apart:.1e} |")
    print(f"allowed: {limit:.1e}")
    return int(not complete or not worst <= limit)
