"""A start with Ray: workers that have imported nothing get the schedule by verl's plugin alone.

    RAY_TESTS=1 python -m pytest benchmarks/trainers/test_ray.py

A whole program with Ray takes minutes: benchmarks/trainers/verl_run.py and slime_run.py.
"""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.trainers.verl_run import write_plugin
from tests.core.trainers.both import Step
from tests.core.trainers.registry import installed
from tests.core.trainers.test_verl import ON, ROOT

LAYOUTS = ("pp2-value-plugin",)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("RAY_TESTS"), reason="Ray starts a dozen processes: set RAY_TESTS=1"
)
def test_rays_workers_get_the_stock_schedules_results(tmp_path):
    """With pipeline stages and verl's critic; pip's verl brings Ray."""
    folder = installed("verl")
    write_plugin(tmp_path)
    path = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", ""), str(folder)]
    named = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "RAY_raylet_start_wait_time_s": "120",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.trainers.ray_steps", *LAYOUTS],
        cwd=ROOT, env={**os.environ, **ON, **named}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"layout"')]
    assert len(lines) == len(LAYOUTS), done.stdout[-2000:] + done.stderr[-4000:]
    for run in map(json.loads, lines):
        assert not run["error"], run["error"]
        assert len(run["ranks"]) == 2
        for steps in ([Step(**step) for step in rank] for rank in run["ranks"]):
            assert [step.kind for step in steps] == ["forward", "update"]
            assert [step.problem for step in steps] == ["", ""]
