"""verl of the registry runs its own engine steps with the prefix schedule in Megatron's place."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.both import Step

ROOT = Path(__file__).parents[2]
PINS = Path(__file__).with_name("verl.txt")
LAYOUTS = ("1", "tp2-sp", "pp2", "tp2-pp2", "cp2", "pp2-fused")
UNREACHABLE = (
    "connection broken", "Failed to establish", "Temporary failure in name resolution",
    "timed out", "Cannot connect to proxy",
)  # fmt: skip


def installed() -> Path:
    """The folder with verl, beside this environment's other packages; made at the first call."""
    digest = hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]
    folder = Path(sys.prefix) / "trainers" / f"verl-{digest}"
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
        made = subprocess.run(
            [*command, "--target", str(part), "-r", str(PINS)],
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        if made.returncode and any(text in made.stderr for text in UNREACHABLE):
            pytest.skip(f"pip does not reach a registry with verl: {made.stderr[-300:]}")
        assert not made.returncode, made.stderr
        try:
            part.rename(folder)
        except OSError:  # another run was faster
            assert folder.exists()
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    """What every layout's ranks saw; one process imports verl for all of them."""
    if sys.version_info < (3, 11):
        pytest.skip("the pins of verl.txt are for Python 3.11 and newer")
    found = subprocess.run(
        [sys.executable, "-m", "tests.trainers.verl_steps", str(installed()), *LAYOUTS],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    lines = [line for line in found.stdout.splitlines() if line.startswith('{"layout"')]
    assert len(lines) == len(LAYOUTS), found.stdout[-2000:] + found.stderr[-4000:]
    return {run["layout"]: run for run in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_verl_gets_the_stock_schedules_results(runs: dict[str, Any], layout: str) -> None:
    run = runs[layout]
    assert not run["error"], run["error"]
    for rank in run["ranks"]:
        steps = [Step(**step) for step in rank]
        assert [step.kind for step in steps] == ["forward", "update"]
        assert [step.problem for step in steps] == ["", ""]
