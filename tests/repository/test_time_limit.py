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

IN_C = """
import ctypes

def test_hangs():
    lock, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    c.pthread_mutex_lock(lock)
    c.pthread_mutex_lock(lock)

def test_is_fine():
    pass
"""


def run(folder, source, *limits):
    """pytest with the settings of this repository, but for its limits, in a worker of xdist."""
    (folder / "test_both.py").write_text(source, "utf-8")
    command = [sys.executable, "-m", "pytest", "-c", str(REPOSITORY / "pyproject.toml"), *limits]
    command += ["-p", "no:cacheprovider", "--numprocesses", "1", str(folder / "test_both.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_a_hanging_test_ends_and_leaves_no_rank(tmp_path):
    done = run(tmp_path, IN_RANKS, "--timeout", "200")
    assert "Failed: Timeout (>200.0s) from pytest-timeout" in done.stdout
    assert re.search(r"= 1 failed, 1 passed in", done.stdout)
    ranks = re.findall(r"rank (\d+)", (tmp_path / "ranks").read_text("utf-8"))
    assert len(ranks) == 2
    assert not [rank for rank in ranks if Path("/proc", rank).exists()]


def test_one_that_hangs_in_c_ends_its_worker(tmp_path):
    """It does not hear the signal."""
    done = run(tmp_path, IN_C, "--timeout", "1", "-o", "faulthandler_timeout=3")
    assert re.search(r"worker 'gw\d' crashed while running .*test_hangs", done.stdout)
    assert re.search(r"most recent call first.*\n.*in test_hangs", done.stderr)
    assert re.search(r"= 1 failed, 1 passed in", done.stdout)
