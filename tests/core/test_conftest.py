"""What tests/conftest.py promises to every test: one that hangs is ended with everything that it
has started, and the next one runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.data import REPOSITORY
from tests.harness.forked_workers import import_tests


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_unwritten_memory_is_nan(dtype):
    assert torch.empty(7, dtype=dtype).isnan().all()
    assert torch.zeros(3, dtype=dtype).new_empty(5).isnan().all()


def test_unwritten_memory_is_nan_in_forked_ranks():
    from tests.harness.ranks import run_ranks

    assert run_ranks(2, lambda: bool(torch.empty(7).isnan().all())) == [True, True]


def test_what_cannot_be_imported_is_left_to_workers(pytestconfig, tmp_path):
    """A worker that found the first half of a file would miss the tests of the second."""
    lines = {"skipped": "pytest.skip(allow_module_level=True)", "wrong": "1 / 0", "right": ""}
    files = [tmp_path / f"test_{name}.py" for name in lines]
    for file, line in zip(files, lines.values(), strict=True):
        file.write_text(f"import pytest\n{line}\n", "utf-8")
    before = {*sys.modules}
    import_tests(files, pytestconfig)
    new = {*sys.modules} - before
    assert [name.rpartition(".")[2] for name in new if name.endswith((*lines,))] == ["test_right"]
    for name in new:
        del sys.modules[name]


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked, as on Linux")
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
