"""What tests/conftest.py promises to every test."""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch

from tests.harness.cores import keep_to_one_core


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_unwritten_memory_is_nan(dtype):
    assert torch.empty(7, dtype=dtype).isnan().all()
    assert torch.zeros(3, dtype=dtype).new_empty(5).isnan().all()


def test_unwritten_memory_is_nan_in_forked_ranks():
    from tests.harness.ranks import run_ranks

    assert run_ranks(2, lambda: bool(torch.empty(7).isnan().all())) == [True, True]


def test_garbage_is_collected_in_tests_though_not_before():
    assert gc.isenabled()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems choose the core themselves")
@pytest.mark.parametrize(
    ("worker", "workers", "kept"),
    [("gw0", "4", [{2}]), ("gw3", "4", [{5}]), ("gw4", "5", [{2}]), ("gw1", "3", []), ("", "", [])],
)
def test_two_workers_share_a_core(monkeypatch, worker, workers, kept):
    """Of the two that there are here; with fewer workers nobody is bound to one."""
    found, kinds = [], []
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", workers)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: found.append(cores))
    monkeypatch.setattr(os, "sched_setscheduler", lambda process, kind, _: kinds.append(kind))
    keep_to_one_core()
    assert found == kept
    assert kinds == [os.SCHED_BATCH] * len(kept)
