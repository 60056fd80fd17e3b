"""How steps of trainers are run twice and compared."""

import importlib
import sys

import pytest
import torch

from benchmarks.trainers import run_sources
from megatron_prefix.features.watch.around import WATCHED
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.refusals.table import OTHER_ROUTER, TWO_CALLS
from tests.core.trainers import stand_ins
from tests.core.trainers.both import Step, copies, flat, furthest, gradients, saved, sizes
from tests.harness import ranks  # applies the CPU platform


class OnlyNext:
    """An iterator without `__iter__`, as Megatron-LM has it."""

    def __init__(self):
        self._numbers = iter(range(5))

    def __next__(self):
        return next(self._numbers)


class Indexed:
    """A place in a list, as slime has it."""

    def __init__(self):
        self.place = -1

    def get_next(self):
        self.place += 1
        return self.place


def numbers(iterator):
    one = iterator.get_next if hasattr(iterator, "get_next") else iterator.__next__
    return [one() for _ in range(3)]


@pytest.mark.parametrize("make", [OnlyNext, Indexed, lambda: iter(range(5))])
def test_both_schedules_read_the_same_microbatches(make):
    given = make()
    (first,), (second,) = copies([given], 2)
    assert numbers(first) == numbers(second) == [0, 1, 2]
    assert (given.get_next() if hasattr(given, "get_next") else next(given)) == 3
    assert copies(None, 2) == [None, None]


def test_a_forward_step_may_change_its_batch():
    first, second = copies(iter([{"tokens": 1}]), 2)
    next(first)["tokens"] = 2
    assert next(second) == {"tokens": 1}


def test_numbers_in_results_are_found_by_their_place():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    found = flat([{"loss": 2.0, "name": "x", "values": nested}, (torch.ones(1), 3)])
    assert {name: value.tolist() for name, value in found.items()} == {
        "/0/loss": 2.0, "/0/values": [1.0, 1.0, 1.0], "/1/0": [1.0], "/1/1": 3.0,
    }  # fmt: skip


def test_sources_that_are_not_there_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_sources", str(tmp_path)])
    assert run_sources.main() == 1
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == sum(len(one.layouts) for one in run_sources.TRAINERS.values())
    assert all("failed: no folder" in line for line in lines)


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ({"a": [2.0, 4.0], "b": [0.001]}, 0.0), ({"a": [4.0, 2.0], "b": [0.001]}, 0.5),
        ({"a": [2.0, 4.0], "b": [0.041]}, 1.0),
        ({"a": [2.0, float("nan")], "b": [0.001]}, float("inf")), ({"a": [2.0, 4.0]}, float("inf")),
        ({"a": [2.0], "b": [0.001]}, float("inf")),
    ],
)  # fmt: skip
def test_the_comparison_sees(found, difference):
    expected = {"a": torch.tensor([2.0, 4.0]), "b": torch.tensor([0.001])}
    given = {name: torch.tensor(value) for name, value in found.items()}
    assert furthest(given, expected) == pytest.approx(difference)
    step = Step("update", 50, 100, 1e-5, furthest(given, expected), 0.0)
    assert bool(step.problem) == (difference > 0)


def test_a_step_of_the_stock_schedule_is_stocks_bit_for_bit():
    known = {"executed": 0, "raw": 0, "limit": 1.0, "reason": "routes in order"}
    assert not Step("update", gradient=0.0, results=0.0, **known).problem
    for gradient, results in ((1e-9, 0.0), (0.0, 1e-9), (float("nan"), 0.0)):
        step = Step("update", gradient=gradient, results=results, **known)
        assert "routes in order" in step.problem


def test_the_table_tells_why_a_form_falls_back():
    watched = Step("update", 0, 0, 1.0, 0.0, 0.0, reason=WATCHED)
    fell_back = Step("update", 0, 0, 1.0, 0.0, 0.0, reason="routes in order")
    shared = Step("forward", 40, 100, 1e-5, 0.0, 2e-6)
    assert run_sources.told([watched, shared]) == "0.0e+00 | 2.0e-06 | 1.0e-05 | 40 of 100"
    assert run_sources.told([watched, fell_back]).endswith("stock schedule: routes in order")
    assert "failed" in run_sources.told([watched])
    watched.gradient = 1e-7
    assert "failed" in run_sources.told([watched, shared])


def test_a_form_that_falls_back_otherwise_than_listed_has_failed():
    stock = run_sources.STOCK + OTHER_ROUTER.given(3, "Own").text
    assert run_sources.as_listed("shared", None) == "shared"
    assert run_sources.as_listed(stock, OTHER_ROUTER) == stock
    for said, refusal in ((stock, None), (stock, TWO_CALLS), ("shared", OTHER_ROUTER)):
        assert run_sources.as_listed(said, refusal).startswith("failed: not as listed")


def test_what_a_trainer_keeps_is_put_back_as_often_as_needed():
    queue = OnlyNext()
    queue.routes, queue.place = [1, 2], 0
    put_back = saved([queue])
    drawn = torch.rand(2)
    for _ in range(2):
        queue.routes.append(3)
        queue.place = 1
        put_back()
        assert (queue.routes, queue.place) == ([1, 2], 0)
        assert torch.equal(torch.rand(2), drawn)


def test_lists_of_losses_are_put_back_and_counted():
    """AReaL's: a list in a loss, and a tracker with a dict of lists."""
    outputs, tracker = [1], OnlyNext()
    tracker.stats = {"loss": [2]}
    put_back = saved([outputs, tracker])
    for _ in range(2):
        outputs.append(3)
        tracker.stats["loss"].append(3)
        tracker.stats["other"] = []
        assert sizes([outputs]) == [{"": 2}]
        put_back()
        assert outputs == [1] and tracker.stats == {"loss": [2]}


def parts(_):
    """How much of each gradient is this rank's, and how much there is."""
    runtime.initialize(Layout(dp=2))
    spec = resolve("tiny-qwen3", num_layers=2).with_vocab(64)
    (chunk,) = build_model(spec, layout=Layout(dp=2), use_distributed_optimizer=True)
    own = gradients([chunk])
    return {
        name: (own[f"0.{name}"].numel(), parameter.numel())
        for name, parameter in chunk.named_parameters()
    }


def test_a_distributed_optimizers_gradients_on_their_own_ranks():
    first, second = ranks.run_ranks(2, parts, "")
    assert first.keys() == second.keys()
    for name, (mine, whole) in first.items():
        assert mine + second[name][0] == whole
    assert all(sum(mine for mine, _ in one.values()) for one in (first, second))


def test_a_step_in_which_nothing_was_shared_is_a_problem():
    assert "nothing was shared" in Step("update", 100, 100, 1e-5, 0.0, 0.0).problem


def test_only_a_package_that_is_missing_gets_a_stand_in(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    stand_ins.where_missing("json", "no_such_package")
    assert importlib.import_module("no_such_package").PY3
    assert importlib.import_module("json").loads("[1]") == [1]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_such_package")
