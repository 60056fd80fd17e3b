"""`python -m benchmarks.step_trace compare`, and the parts of `record` that need no model."""

import argparse
import copy
import gc
import json
from pathlib import Path

import pytest
import torch

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


def test_places_are_no_difference_and_views_can_be_left_out(tmp_path):
    new = record()
    rank = new["configs"]["one"][0]
    rank["places"] = [4, 4, 4, 4]
    assert compared(tmp_path, new) == 0
    rank["operations"], rank["places"] = [0, 2, 1, 1, 0], [4] * 5
    assert compared(tmp_path, new) == 1
    assert compared(tmp_path, new, "--ignore-views") == 0


@pytest.mark.parametrize(
    ("kind", "name", "value", "told"),
    [
        ("digests", "gradient of v", "ce", "digests: gradient of v cd before, ce now"),
        ("host waits", "aten.item", 1, "host waits: aten.item None before, 1 now"),
        ("bytes", "peak", 11, "bytes: peak 10 before, 11 now"),
        ("cuda", "kernels", 7, "cuda: kernels None before, 7 now"),
    ],
)
def test_another_value_is_a_difference(tmp_path, capsys, kind, name, value, told):
    new = record()
    new["configs"]["one"][0].setdefault(kind, {})[name] = value
    assert compared(tmp_path, new) == 1
    assert capsys.readouterr().out == f"one, rank 0: {told}\n"


def test_missing_configs_and_other_versions_are_differences(tmp_path, capsys):
    new = record()
    del new["configs"]["one"]
    new["made by"]["torch"] = "3"
    assert compared(tmp_path, new) == 1
    versions, missing = capsys.readouterr().out.splitlines()
    assert versions == "made by {'torch': '2'} before, by {'torch': '3'} now"
    assert missing == "one: ranks 1 before, 0 now"


def test_operations_have_strides_and_bytes_are_freed():
    x = torch.arange(6.0).reshape(2, 3)
    with step_trace.Operations() as found:
        y = x.t().contiguous()
        z = y[0]
        del y
        bool(z.sum() > 0)
    assert found.lines[0] == "view aten.t.default(float32[2,3](3,1)) -> float32[3,2](1,3)"
    assert found.lines[1].startswith("aten.clone.default(float32[3,2](1,3), memory_format=")
    assert found.lines[1].endswith(" -> float32[3,2](2,1)")
    assert found.waits == {"aten._local_scalar_dense": 1}
    assert found.storages.peak >= 24 == found.storages.live
    del z
    gc.collect()
    assert found.storages.live == 0


def test_a_digest_has_every_bit_and_the_dtype():
    x = torch.tensor([0.0, 1.0])
    assert step_trace.digest({"a": [x]}) == step_trace.digest({"a": [x.clone()]})
    for other in (torch.tensor([-0.0, 1.0]), x.double(), x[None]):
        assert step_trace.digest({"a": [other]}) != step_trace.digest({"a": [x]})


def test_modules_are_found_and_an_error_inside_is_reported(monkeypatch):
    assert step_trace.cpu_platform().__name__.startswith(step_trace.PACKAGE)
    with pytest.raises(ModuleNotFoundError, match="none of no_such"):
        step_trace.moved("no_such")

    def broken(name):
        raise ModuleNotFoundError("no numpy", name="numpy")

    monkeypatch.setattr(step_trace.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="no numpy"):
        step_trace.moved("no_such")


def test_functions_of_the_package_are_noted_and_no_others():
    import megatron_prefix

    entered = set()
    with step_trace.profiled(entered):
        megatron_prefix.PrefixConfig()
        step_trace.digest(1)
    assert ("config.py", "__post_init__") in {(path, name) for path, _, name in entered}
    assert not {name for _, _, name in entered} & {"digest", "__init__"}


def test_what_a_case_has_to_enter_is_in_the_package():
    folder = Path(step_trace.__file__).parents[1] / step_trace.PACKAGE
    for name, case in step_trace.CASES.items():
        for names in case.ran:
            paths = [folder / text.partition(":")[0] for text in names.split("|")]
            assert any(path.exists() for path in paths), (name, names)


def test_a_step_that_leaves_a_feature_out_is_no_step_of_its_case():
    case = step_trace.Case(ran=("moe/replay.py|features/replay/", "run/losses.py:add"))
    functions = ["features/replay/part.py:begin", "run/losses.py:subtract"]
    assert step_trace.not_entered(case, functions) == ["run/losses.py:add"]
    assert step_trace.not_entered(case, ["moe/replay.py:of", "run/losses.py:add"]) == []


def test_launches_run_again_and_a_capture_computes_nothing():
    x, total = torch.ones(2), torch.zeros(2)
    graph = step_trace.Launches(None)
    graph.begin()
    y = x * 3
    total.add_(y)
    graph.end()
    assert not total.any()
    for number in (1, 2):
        x.fill_(number)
        graph.replay()
        assert y.tolist() == [3 * number] * 2
    assert total.tolist() == [9, 9]


def test_images_have_tokens_and_positions_of_their_own():
    members = step_trace.with_images(step_trace.rollouts(False, 0), torch.float32)
    first, last, without = members[0], members[3], members[4]
    start, end = step_trace.IMAGE_START, step_trace.IMAGE_START + step_trace.IMAGE_TOKENS
    assert (first.tokens[start:end] == step_trace.IMAGE).all() and without.pixels is None
    assert torch.equal(first.pixels, members[1].pixels)
    assert not torch.equal(first.pixels, last.pixels)
    places = step_trace._image_positions(first)
    assert places[:, start:end].tolist() == [[5] * 6, [5, 5, 5, 6, 6, 6], [5, 6, 7, 5, 6, 7]]
    assert places[:, end].tolist() == [8, 8, 8] and places[:, start - 1].tolist() == [4, 4, 4]


def test_routes_part_inside_a_prompt_in_one_layer():
    config = argparse.Namespace(num_layers=3, num_moe_experts=4, moe_router_topk=2)
    member = step_trace.rollouts(False, 0)[0]
    usual, other = (step_trace._routes(member, number, config) for number in (0, 3))
    assert ((usual != other).any(2) == (usual != other).all(2)).all()
    layers = (usual != other).any((0, 2)).tolist()
    assert layers == [False, True, False] and (usual[:6] == other[:6]).all()
    assert (usual[..., 0] != usual[..., 1]).all() and usual.max() == 3
