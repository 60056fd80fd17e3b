"""What tests/conftest.py promises to every test."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import leave_rows_out
from tests.harness.forked_workers import import_tests
from tests.harness.rows import EVERYTHING, TURN, TURNS, taking_turns


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
