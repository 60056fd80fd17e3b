"""What tests/conftest.py promises to every test."""

from __future__ import annotations

import gc
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import leave_rows_out
from tests.harness.cores import keep_to_one_core
from tests.harness.forked_workers import import_tests
from tests.harness.frames import SLOTS, with_room
from tests.harness.fuzzing import rounds
from tests.harness.rows import (
    EVERYTHING,
    TURN,
    TURNS,
    check_turn,
    chosen,
    rows,
    taking_turns,
    through,
    turn_of,
)


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


def left(names, *marks):
    """Of rows of a test with these marks, what is run and what is left out."""
    items = [
        SimpleNamespace(
            nodeid=f"file::test[{name}]",
            get_closest_marker={mark: mark in name or mark == "turns" for mark in marks}.get,
        )
        for name in names
    ]
    told = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    leave_rows_out(SimpleNamespace(hook=hook), items)
    return [[one.nodeid[len("file::test[") : -1] for one in some] for some in (items, told)]


@pytest.mark.parametrize("everything", [True, False])
def test_products_are_left_out_of_the_suite(monkeypatch, everything):
    if everything:
        monkeypatch.setenv(EVERYTHING, "1")
    else:
        monkeypatch.delenv(EVERYTHING, raising=False)
    names = ["one", "products"]
    assert left(names, "products") == ([names, []] if everything else [["one"], ["products"]])
    assert rounds(8, 100, fewest=3) == (8 if everything else 3)
    assert through("abc", "b") == ([*"abc"] if everything else [*"ac"])


def test_rows_are_marked_if_they_are_there():
    made = rows([(1, "a"), (1, "b"), (2, "a")], [(1, "b")])
    assert [getattr(one, "marks", ()) != () for one in made] == [False, True, False]
    assert made[1].values == (1, "b")
    with pytest.raises(AssertionError):
        rows(["a"], ["b"])


def test_all_rows_have_their_turn(monkeypatch):
    """The first is always run, and each of the others once; products have no turn."""
    monkeypatch.delenv(EVERYTHING, raising=False)
    names, seen = [*"abc", "products", *"defg"], []
    for turn in range(TURNS):
        monkeypatch.setenv(TURN, str(turn))
        run, _ = left(names, "products", "turns")
        assert run == taking_turns([*"abcdefg"])
        assert run[0] == "a" and len(run) == 3
        seen += run[1:]
    assert sorted(seen) == [*"bcdefg"]
    monkeypatch.setenv(EVERYTHING, "1")
    assert left(names, "products", "turns") == [names, []]
    assert taking_turns("abc") == [*"abc"]


def test_a_commit_says_whose_turn_it_is(tmp_path, pytestconfig):
    assert turn_of(tmp_path) == 0  # outside of a repository
    assert turn_of(pytestconfig.rootpath) in range(TURNS)


@pytest.mark.parametrize("turn", ["3", "-1", "all", ""])
def test_a_turn_that_there_is_not_is_refused(monkeypatch, turn):
    monkeypatch.setenv(TURN, turn)
    with pytest.raises(pytest.UsageError, match="give 0 to 2"):
        check_turn()


@pytest.mark.parametrize("row", ["one", "two"])
def test_rows_that_are_run_are_known(row, request):
    known = chosen(request, "row")
    assert row in known and {*known} <= {"one", "two"}
    assert chosen(request, "row", "another") == []
