"""How steps of trainers are run twice and compared."""

import pytest
import torch

from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from tests.core.trainers.both import Step, copies, furthest, gradients, saved
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
