"""verl's own engine steps in Ray's workers, where its plugin alone turns the schedule on.

    python -m benchmarks.trainers.ray_steps LAYOUT...

With verl and Ray in PYTHONPATH. Every rank is an actor of a Ray of this command's own, in a process
that has imported nothing before; what a layout's name means says verl_steps.py, with "plugin". A
line of JSON a layout, as worker.py prints it.
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
import traceback
from pathlib import Path

import ray
import torch

from benchmarks.trainers import on_ray
from megatron_prefix.lab.runtime.groups import RENDEZVOUS
from tests.core.trainers.worker import layout_of

HOOK = "benchmarks.trainers.ray_steps.on_cpu"


def on_cpu():
    """Prepares a worker, before verl is imported there; `worker` has let Megatron run on it."""
    torch.compiler.set_stance("force_eager")


class Rank:
    """One rank of the job."""

    def steps(self, layout):
        """What it sees of a layout's steps."""
        from tests.core.trainers import verl_steps

        return [dataclasses.asdict(step) for step in verl_steps.steps(layout)]


def run(layout, rendezvous):
    """The same, of every rank; they meet in a file that is not there yet."""
    size = layout_of(layout).world_size
    actors = []
    for rank in range(size):
        environ = {"RANK": str(rank), "WORLD_SIZE": str(size), RENDEZVOUS: str(rendezvous)}
        actor = ray.remote(Rank).options(num_cpus=1, runtime_env={"env_vars": environ})
        actors.append(actor.remote())
    try:
        return ray.get([actor.steps.remote(layout) for actor in actors])
    finally:
        for actor in actors:
            ray.kill(actor)


def main():
    """Runs the layouts of the command line."""
    ray.init(**on_ray.options(HOOK))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        for layout in sys.argv[1:]:
            seen = {"layout": layout, "ranks": [], "error": ""}
            try:
                seen["ranks"] = run(layout, Path(folder) / layout)
            except Exception:  # noqa: BLE001  # the next layout tells its own story
                seen["error"] = traceback.format_exc()
            print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
