"""What tests/conftest.py promises to every test."""

from __future__ import annotations

import gc
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import leave_products_out
from tests.harness.cores import keep_to_one_core
from tests.harness.forked_workers import import_tests
from tests.harness.frames import SLOTS, with_room
from tests.harness.fuzzing import rounds
from tests.harness.rows import EVERYTHING, rows, through


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


def slots() -> int:
    """Of the frame below that of the caller."""
    return sys._getframe(2).f_code.co_stacksize


def test_tests_have_room_for_frames():
    assert with_room(lambda one, *, two: (one, two, slots()), 1, two=2) == (1, 2, SLOTS)
    frame, found = sys._getframe(), set()
    while frame is not None:
        found.add(frame.f_code.co_stacksize)
        frame = frame.f_back
    assert SLOTS in found


@pytest.mark.parametrize("everything", [True, False])
def test_products_are_left_out_of_the_suite(monkeypatch, everything):
    if everything:
        monkeypatch.setenv(EVERYTHING, "1")
    else:
        monkeypatch.delenv(EVERYTHING, raising=False)
    one, product = (
        SimpleNamespace(get_closest_marker={"products": mark}.get) for mark in (None, "a mark")
    )
    items, told = [one, product], []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    leave_products_out(SimpleNamespace(hook=hook), items)
    assert (items, told) == (([one, product], []) if everything else ([one], [product]))
    assert rounds(8, 100, fewest=3) == (8 if everything else 3)
    assert through("abc", "b") == ([*"abc"] if everything else [*"ac"])


def test_rows_are_marked_if_they_are_there():
    made = rows([(1, "a"), (1, "b"), (2, "a")], [(1, "b")])
    assert [getattr(one, "marks", ()) != () for one in made] == [False, True, False]
    assert made[1].values == (1, "b")
    with pytest.raises(AssertionError):
        rows(["a"], ["b"])
