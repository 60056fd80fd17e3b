"""Multi-token prediction in a newer Megatron-Core: calls without labels, and detached heads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from megatron_prefix.features.mtp.layer import WithoutLabels, without_labels
from tests.core.trainers.registry import installed
from tests.harness.data import REPOSITORY


def told(*arguments: str) -> list[dict[str, Any]]:
    """What tests/harness/mtp.py prints there, if all is well."""
    folders = [str(installed("megatron")), *sys.path]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.harness.mtp", *arguments],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=500,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
    )  # fmt: skip
    assert not done.returncode, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines and [line for line in lines if line["error"]] == []
    crossing = [line.get("received") for line in lines]
    assert all(any(one) for one in crossing if one is not None)
    alone = [line for line, one in zip(lines, crossing, strict=True) if one is None]
    assert all(line["executed"] < 0.6 * line["raw"] for line in alone)
    assert {line["megatron"].partition("+")[0] for line in lines} == {"0.19.2"}
    return lines


@pytest.mark.slow
@pytest.mark.products
def test_what_older_releases_run_is_the_stock_schedules() -> None:
    """Cases of test_mtp.py and test_mtp_ranks.py, in this release, and products of its own."""
    told("--old")


@pytest.mark.slow
def test_steps_are_the_stock_schedules() -> None:
    """Among them what the suite's own release lacks."""
    lines = told()
    assert without_labels() is WithoutLabels.FAILS, "the suite's release"
    assert sum("logits=True" in line["case"][1] for line in lines) > 3
    assert sum("mtp_detach_heads" in line["case"][3] for line in lines) > 3
    across = [line for line in lines if "received" in line]
    assert sum("mtp_detach_heads" in line["case"][3] for line in across) == 2
