"""Runs a trainer's steps on ranks of its own and prints what was seen, a line of JSON a layout.

    python -m tests.trainers.verl_steps FOLDER LAYOUT...

A layout is "1", or what it has, joined by "-": "tp2-pp2".
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from megatron_prefix.runtime import Layout
from tests.harness.ranks import run_ranks  # lets Megatron run on the CPU
from tests.trainers.both import Step


def layout_of(name: str) -> Layout:
    """The layout that a name such as "tp2-cp2" means."""
    sizes = dict(re.findall(r"\b(tp|pp|vpp|cp|dp)(\d+)", name))
    return Layout(**{key: int(size) for key, size in sizes.items()})


def main(modules: Sequence[str], steps: Callable[[str], list[Step]]) -> None:
    """Runs `steps(layout's name)` on every rank of each layout of the command line.

    Args:
        modules: of the trainer, imported once for all ranks, which are forked.
    """
    folder, *names = sys.argv[1:]
    sys.path.append(folder)
    for module in modules:
        importlib.import_module(module)
    for name in names:
        seen: dict[str, Any] = {"layout": name, "ranks": [], "error": ""}
        try:
            ranks = run_ranks(layout_of(name).world_size, steps, name, timeout_s=240.0)
            seen["ranks"] = [[dataclasses.asdict(step) for step in rank] for rank in ranks]
        except Exception:  # noqa: BLE001  # the next layout tells its own story
            seen["error"] = traceback.format_exc()
        print(json.dumps(seen), flush=True)
