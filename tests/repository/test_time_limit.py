"""A test that hangs is ended with everything that it has started, and the next one runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.data import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked, as on Linux"),
]
IN_RANKS = """
import os, signal, threading, time
from pathlib import Path
from megatron_prefix.lab import runtime

NOTES = Path("ranks")

def stay():
    with NOTES.open("a") as notes:
        notes.write(f"rank {os.getpid()} ")
    time.sleep(600)

def hasten():
    while not NOTES.exists() or len(NOTES.read_text().split()) < 4:
        time.sleep(0.05)
    signal.setitimer(signal.ITIMER_REAL, 0.01)

def test_hangs():
    threading.Thread(target=hasten, daemon=True).start()
    runtime.run_ranks(stay, 2)

def test_is_fine():
    pass
"""


def test_a_hanging_test_ends_and_leaves_no_rank(tmp_path):
    """With the settings of this repository, in a worker of xdist."""
    (tmp_path / "test_both.py").write_text(IN_RANKS, "utf-8")
    command = [sys.executable, "-m", "pytest", "-c", str(REPOSITORY / "pyproject.toml")]
    command += ["--timeout", "200", "-p", "no:cacheprovider", "--numprocesses", "1"]
    command.append(str(tmp_path / "test_both.py"))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "Failed: Timeout (>200.0s) from pytest-timeout" in done.stdout
    assert re.search(r"= 1 failed, 1 passed in", done.stdout)
    ranks = re.findall(r"rank (\d+)", (tmp_path / "ranks").read_text("utf-8"))
    assert len(ranks) == 2
    assert not [rank for rank in ranks if Path("/proc", rank).exists()]
