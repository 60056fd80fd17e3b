"""Bad usage is one line, whatever has started the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_prefix.auto import first_line as module
from tests.harness.data import REPOSITORY

WAITS = [
    ({}, 0.0),
    ({"RANK": "1", "LOCAL_RANK": "1"}, 0.0),  # not torchrun's
    ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0"}, 0.0),
    ({"TORCHELASTIC_RUN_ID": "none", "RANK": "8", "LOCAL_RANK": "0"}, module.WAIT_S),
    ({"TORCHELASTIC_RUN_ID": "none", "RANK": "9", "LOCAL_RANK": "1"}, 2 * module.WAIT_S),
]


@pytest.mark.parametrize(("environ", "seconds"), WAITS)
def test_the_first_rank_is_heard_first(monkeypatch, capsys, environ, seconds) -> None:
    """torchrun ends the others meanwhile; one that stays has an error of its own."""
    waited: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waited.append)
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    module.first_line("a line")
    assert capsys.readouterr().err == "a line\n"
    assert sum(waited) == seconds


def test_torchruns_ranks_say_bad_usage_once() -> None:
    words = ("megatron_prefix", "plan", "no-such-file.jsonl")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", *words],
        cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1  # torchrun's own, whatever its ranks' are
    lines = done.stderr.splitlines()
    assert sum(line.startswith("megatron-prefix plan: ") for line in lines) == 1, done.stderr
    root = lines[next(i for i, line in enumerate(lines) if line.startswith("Root Cause")) :]
    assert "exitcode  : 2 " in " ".join(root) and "rank      : 0 " in " ".join(root)
    assert "megatron_prefix/" not in done.stderr  # no traceback of ours
