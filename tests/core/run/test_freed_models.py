"""A model that is dropped after a step is freed, whatever kept tensors of the step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run import request
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.failures import CONFIG, Fault, items
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract

EXPERTS = ("tiny-moe", "tiny-gpt-oss", "tiny-deepseek")
SCHEDULE = PrefixSchedule(CONFIG)
"""It outlives the models, as that of a process does."""


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        gc.collect()
        gc.freeze()  # what is here already does not concern the collector in these tests
        yield
        gc.unfreeze()


def keep_outputs(model: Any) -> None:
    """Layers keep their output with its graph, as a trainer's probe does."""

    def keep(layer: Any, _: Any, output: Any) -> None:
        layer.kept = output

    for layer in unwrap(model).decoder.layers:
        layer.register_forward_hook(keep)


def fail_in_a_segment(model: Any) -> None:
    """The second forward of the last layer raises."""
    calls = iter([False, True])

    def count(*_: Any) -> None:
        if next(calls, False):
            raise Fault

    unwrap(model).decoder.layers[-1].register_forward_hook(count)


def change_nothing(_: Any) -> None:
    pass


def is_freed(schedule: Any, name: str, prepare: Callable[[Any], None], **options: Any) -> bool:
    """Whether a model goes with its last name, after a step."""
    model = small_model(name, **options)
    prepare(model)
    gone = weakref.ref(model)
    try:
        steps.call(schedule, Contract().step, model, items())
    except Fault:
        assert prepare is fail_in_a_segment
    else:
        assert prepare is not fail_in_a_segment
    del model
    gc.collect()
    return gone() is None


CASES = [
    ("tiny-llama", fail_in_a_segment),
    *((name, change_nothing) for name in EXPERTS),
    ("tiny-moe", keep_outputs),
    ("tiny-moe", fail_in_a_segment),
]


@pytest.mark.parametrize(("name", "prepare"), CASES)
def test_a_shared_step_holds_no_model(name: str, prepare: Callable[[Any], None]) -> None:
    assert is_freed(SCHEDULE, name, prepare, wrap_ddp=False)
    if prepare is not fail_in_a_segment:
        assert SCHEDULE.report is not None and SCHEDULE.report.decision.share


def test_nor_does_it_with_ddp_where_the_stock_schedules_does() -> None:
    """There hooks on gradients hold the model, and Megatron's dispatcher the graph to them."""
    assert not is_freed(stock_schedule(), "tiny-moe", change_nothing)
    assert is_freed(SCHEDULE, "tiny-moe", change_nothing)


def test_what_is_refused_of_a_model_does_not_hold_it() -> None:
    """The schedule remembers the error, not the frames that it went through."""
    schedule = PrefixSchedule(replace(CONFIG, mode="auto"), looks_first=True)
    assert is_freed(
        schedule, "tiny-llama", change_nothing, wrap_ddp=False,
        config_overrides={"hidden_dropout": 0.1},
    )  # fmt: skip
    assert schedule.report is not None and "hidden_dropout" in schedule.report.decision.reason
    strict = PrefixSchedule(CONFIG, looks_first=True)
    model = small_model(config_overrides={"hidden_dropout": 0.1}, wrap_ddp=False)
    gone = weakref.ref(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="hidden_dropout"):
            steps.call(strict, Contract().step, model, items())
    del model
    gc.collect()
    assert gone() is None


def test_a_new_model_in_the_place_of_an_old_one_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python gives the address of what has gone to what is made next."""
    monkeypatch.setattr(request, "id", lambda _: 1, raising=False)
    schedule = PrefixSchedule(replace(CONFIG, mode="auto"), looks_first=True)
    for dropout in (0.1, 0.0):
        model = small_model(config_overrides={"hidden_dropout": dropout}, wrap_ddp=False)
        steps.call(schedule, Contract().step, model, items())
        reason = schedule.report.decision.reason  # type: ignore[union-attr]
        assert ("hidden_dropout" in reason) == bool(dropout)
        del model
        gc.collect()
