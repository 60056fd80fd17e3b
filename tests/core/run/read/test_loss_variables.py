"""What forward steps keep for their losses outside of their own variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix.run.read.loss_variables import LossVariables
from tests.harness import steps
from tests.harness.one_group import items, run, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract, Microbatch

CONTRACT = Contract()
kept: Any = None


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def modelled(batch: Microbatch, model: Any) -> Any:
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])


def scored(batch: Microbatch, output: Any) -> Any:
    return CONTRACT.loss_func(batch)(output)


class Attributes:
    def __init__(self) -> None:
        self.count, self.state = 0, SimpleNamespace(batch=None)

    def step(self, iterator: Any, model: Any) -> Any:
        self.count += 1
        self.state.batch = next(iterator)
        return modelled(self.state.batch, model), self.loss

    __call__ = step

    def loss(self, output: Any) -> Any:
        loss, num, logs = scored(self.state.batch, output)
        self.count += 10
        self.state.batch = None
        return loss, num, {**logs, "count": self.count}


@pytest.mark.parametrize("made", [lambda: Attributes().step, Attributes])
def test_losses_see_what_their_own_step_has_kept(made: Callable[[], Any]) -> None:
    found = []
    for schedule in (stock_schedule(), schedule_with()):
        model = small_model()
        found.append(run(schedule, model, SimpleNamespace(step=made())))  # type: ignore[arg-type]
    (wanted, _), (logs, own) = found
    for mine, theirs in zip(logs, wanted, strict=True):
        assert [mine.get(n) for n in ("uid", "count")] == [theirs.get(n) for n in ("uid", "count")]
    reference = steps.plain(small_model(wrap_ddp=False), CONTRACT, items())
    steps.assert_gradients(own, reference, sum(item["tokens"].numel() for item in items()))


def test_afterwards_the_last_steps_bindings_stay() -> None:
    """Also where another step went on last, but not where a loss has bound something else."""
    place = {"number": 0, "batch": "", "freed": ""}
    both = LossVariables(functools.partial(lambda state: state, place))
    states = []
    for number in range(3):
        before = both.swap(None, True)
        place.update(number=place["number"] + 1, batch=f"of {number}", freed=f"of {number}")
        states.append(both.swap(before, False))
    for number in (0, 2, 1):
        both.swap(states[number], True)
        assert place["batch"] == place["freed"] == f"of {number}"
        place["freed"] = ""
    both.end()
    assert place == {"number": 3, "batch": "of 2", "freed": ""}
