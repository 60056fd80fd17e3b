"""A test that hangs is ended with everything that it has started, and the next one runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.data import REPOSITORY

HANGS = """
import ctypes, os, time
from megatron_prefix.lab import runtime

def stay():
    print("rank", os.getpid(), file=open("ranks", "a"))
    time.sleep(600)

def test_hangs_in_ranks():
    runtime.run_ranks(stay, 2)

def test_hangs_in_c():
    lock, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    c.pthread_mutex_lock(lock)
    c.pthread_mutex_lock(lock)

def test_is_fine():
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked and found in /proc")
def test_a_hanging_test_ends_and_leaves_no_rank(tmp_path):
    (tmp_path / "test_hangs.py").write_text(HANGS, "utf-8")
    command = [sys.executable, "-m", "pytest", "-c", str(REPOSITORY / "pyproject.toml")]
    command += ["--timeout", "5", "-o", "faulthandler_timeout=8", "--numprocesses", "1"]
    command += ["-p", "no:cacheprovider", str(tmp_path / "test_hangs.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "Failed: Timeout (>5.0s) from pytest-timeout" in done.stdout
    assert re.search(r"worker 'gw\d' crashed while running .*test_hangs_in_c", done.stdout)
    assert re.search(r"most recent call first.*\n.*in test_hangs_in_c", done.stderr)
    assert re.search(r"= 2 failed, 1 passed in", done.stdout)
    ranks = re.findall(r"rank (\d+)", (tmp_path / "ranks").read_text("utf-8"))
    assert len(ranks) == 2
    assert not [rank for rank in ranks if Path("/proc", rank).exists()]
