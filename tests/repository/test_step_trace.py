"""`python -m benchmarks.step_trace compare`, and the parts of `record` that need no model."""

import copy
import json

import pytest

from benchmarks import step_trace

LINES = ["aten.mm.default(a)", "view aten.t.default(b)", "aten.add.Tensor(c)", "x/y.py:1 f", ""]


def record():
    """Two configs, one of them with two ranks."""
    rank = {
        "operations": [0, 1, 2, 0], "places": [3, 4, 3, 4], "host waits": {"aten.nonzero": 2},
        "bytes": {"peak": 10}, "digests": {"gradient of w": "ab", "gradient of v": "cd"},
    }  # fmt: skip
    ranks = {"one": [rank], "two": [copy.deepcopy(rank), copy.deepcopy(rank)]}
    return {"made by": {"torch": "2"}, "lines": LINES, "configs": ranks}


def compared(folder, new, *options):
    """The exit code of the command for the record above and another one."""
    for name, value in (("old", record()), ("new", new)):
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return step_trace.main(["compare", str(folder / "old"), str(folder / "new"), *options])


def test_equal_records_pass_whatever_the_order_of_their_tables(tmp_path, capsys):
    new = record()
    new["lines"] = [*reversed(LINES)]
    for rank in (rank for config in new["configs"].values() for rank in config):
        for key in ("operations", "places"):
            rank[key] = [len(LINES) - 1 - number for number in rank[key]]
    assert compared(tmp_path, new) == 0
    assert capsys.readouterr().out == "the same: 2 configs, 3 ranks, 12 operations, 6 digests\n"


def test_the_first_difference_is_shown_and_all_are_counted(tmp_path, capsys):
    new = record()
    new["configs"]["two"][1]["operations"] = [0, 1, 0, 2, 2]
    new["configs"]["two"][1]["places"] = [3, 4, 3, 4, 4]
    assert compared(tmp_path, new) == 1
    assert capsys.readouterr().out.splitlines() == [
        "two, rank 1: operation 2 of 4 before, of 5 now", "  after view aten.t.default(b)",
        "  before aten.add.Tensor(c)  [x/y.py:1 f]", "  now    aten.mm.default(a)  [x/y.py:1 f]",
        "  counts +1 aten.add.Tensor",
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value", "told"), [
    ("digests", "gradient of v", "ce", "digests: gradient of v cd before, ce now"),
    ("host waits", "aten.item", 1, "host waits: aten.item None before, 1 now"),
    ("bytes", "peak", 11, "bytes: peak 10 before, 11 now"),
    ("cuda", "kernels", 7, "cuda: kernels None before, 7 now"),
])  # fmt: skip
def test_another_value_is_a_difference(tmp_path, capsys, kind, name, value, told):
    new = record()
    new["configs"]["one"][0].setdefault(kind, {})[name] = value
    assert compared(tmp_path, new) == 1
    assert capsys.readouterr().out == f"one, rank 0: {told}\n"
