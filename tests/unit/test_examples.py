"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree

from tests.harness.data import REPOSITORY


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan_a_step(tmp_path):
    picture = tmp_path / "plan.svg"
    said = run("plan_a_step.py", str(picture))
    # Each group: 2 rollouts of 639 positions, 2 of 735; its tree: 511 + 96 + 4 x 128.
    assert "5496 tokens, 2238 of them executed" in said
    assert "4: wave of 2, positions 607 to 734, rollouts [2, 3]" in said
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_share_a_prompt():
    said = run("share_a_prompt.py")
    # 6 rollouts of 223 positions share 191: the label of the last prompt token is not shared.
    assert "tokens 1338, executed 383" in said
    assert "largest difference of a gradient" in said
