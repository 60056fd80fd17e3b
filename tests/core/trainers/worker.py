"""Runs a trainer's steps on ranks of its own and prints what was seen, a line of JSON a layout.

    python -m tests.core.trainers.verl_steps FOLDER[:FOLDER...] LAYOUT...

The folders are where the trainer's modules are. A layout is "1", or what it has, joined by "-":
"tp2-pp2"; "sp" is sequence parallelism.
"""

import dataclasses
import importlib
import json
import os
import re
import sys
import traceback

import torch

from megatron_prefix.lab.runtime import Layout
from tests.core.trainers.stand_ins import StandIns as StandIns
from tests.harness.ranks import run_ranks  # lets Megatron run on the CPU


def layout_of(name):
    """The layout that a name such as "tp2-sp-cp2" means."""
    sizes = dict(re.findall(r"\b(tp|pp|vpp|cp|ep|dp)(\d+)", name))
    sequence_parallel = "-sp" in name
    return Layout(
        **{key: int(size) for key, size in sizes.items()}, sequence_parallel=sequence_parallel
    )


def main(modules, steps):
    """Runs `steps(layout's name)` on every rank of each layout of the command line."""
    folders, *names = sys.argv[1:]
    sys.path += folders.split(os.pathsep)
    torch.compiler.set_stance("force_eager")
    for module in modules:
        importlib.import_module(module)
    for name in names:
        seen = {"layout": name, "ranks": [], "error": ""}
        try:
            ranks = run_ranks(layout_of(name).world_size, steps, name, timeout_s=240.0)
            seen["ranks"] = [[dataclasses.asdict(step) for step in rank] for rank in ranks]
        except Exception:  # noqa: BLE001  # the next layout tells its own story
            seen["error"] = traceback.format_exc()
        print(json.dumps(seen), flush=True)
