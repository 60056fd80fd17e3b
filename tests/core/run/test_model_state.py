"""State that a module keeps itself, and the walk that looks for what forward steps set; rows of it:
tests/test_cases_of_trainers.py."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.run.read.model_walk import WALK, ModelWalk
from tests.harness.one_group import assert_aligned, run, schedule_with
from tests.harness.one_rank import one_rank, small_model


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


class Counting(torch.nn.Module):
    """Keeps what it sees: a number, a table by length, a running mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.tables = 0, dict[int, Any]()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        self.num_calls += 1
        self.mean += x.detach().mean()
        self.last = x.detach()
        self.tables.setdefault(len(x), torch.ones(len(x), 1, 1, dtype=torch.float64))
        return x * self.tables[len(x)]


def test_what_a_module_counts_itself_is_in_nobodys_way() -> None:
    model, counting = small_model(), Counting()
    decoder = unwrap(model).decoder
    decoder.counting = counting
    decoder.layers[0].register_forward_hook(lambda _, args, output: (counting(output[0]), None))
    schedule = schedule_with(looks_first=True, mode="auto", min_speedup=0.01)
    for shared in (False, True):
        step = run(schedule, model)
        assert schedule.report.decision.share == shared
    assert_aligned(step, model)
    assert counting.num_calls > 5 and len(counting.tables) > 1


def test_a_model_takes_its_walk_with_it() -> None:
    """What is kept between steps is the model's: no copy has it, and it holds no model."""
    model = small_model()
    run(schedule_with(looks_first=True, mode="on"), model)
    inner = unwrap(model)
    assert isinstance(vars(inner)[WALK], ModelWalk)
    made, arguments = vars(inner)[WALK].__reduce__()
    assert made(*arguments) is None
    assert copy.deepcopy({"walk": vars(inner)[WALK]}) == {"walk": None}
    alive = weakref.ref(vars(inner)[WALK])
    del vars(inner)[WALK]
    gc.collect()
    assert alive() is None
