"""Settings that a trainer's model calls run under, and the segments that stand for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from torch.cuda.amp import common

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.run.read.suspend import Settings
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract

ON = {"mode": "on", "kernel": "math", "min_gain": 0}
Settle = Callable[[int, Any], contextlib.AbstractContextManager[Any]]
"""(number of the microbatch, model) -> what its forward step enters around the model call."""


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def in_bf16(*_: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    model.eval()
    yield
    model.train()


def run(schedule: Any, model: Any, settle: Settle, num: int = 2, **options: Any) -> list[Any]:
    """Logs of one step of a group of rollouts, one a microbatch."""
    items, contract = steps.group(0, num), Contract()

    def step(iterator: Any, model: Any) -> Any:
        item = next(iterator)
        with settle(item["uid"], model):
            return contract.step(iter([item]), model)

    return steps.call(schedule, step, model, items, **options)


# Calls of one step that differ --------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 1])
def test_two_calls_under_two_autocasts_are_refused(odd: int) -> None:
    def settle(uid: int, _: Any) -> Any:
        return in_bf16() if uid == odd else contextlib.nullcontext()

    with pytest.raises(CannotShare, match="under different autocast settings"):
        run(PrefixSchedule(PrefixConfig(**ON)), small_model(), settle)


@pytest.mark.parametrize("odd", [0, 1])
def test_one_call_in_another_mode_is_refused(odd: int) -> None:
    def settle(uid: int, model: Any) -> Any:
        return evaluating(model) if uid == odd else contextlib.nullcontext()

    with pytest.raises(CannotShare, match=r"calls model.train\(\) or model.eval\(\)"):
        run(PrefixSchedule(PrefixConfig(**ON)), small_model(), settle)


# Autocast of the model's configuration ------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False])
def test_forward_steps_and_segments_see_the_configs_autocast(
    monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    """As in Megatron's schedule.  Autocast for CUDA is a setting that the CPU has, too, once torch
    does not ask for a GPU."""
    monkeypatch.setattr(common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    found = []
    for schedule in (stock_schedule(), PrefixSchedule(PrefixConfig(**ON))):
        model = small_model()
        config = unwrap(model).config
        config.enable_autocast, config.autocast_dtype = on, torch.bfloat16
        seen: list[Any] = []

        def note(*_: Any, seen: list[Any] = seen) -> None:
            seen.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))

        def settle(*_: Any, note: Any = note) -> Any:
            note()
            return contextlib.nullcontext()

        unwrap(model).decoder.register_forward_pre_hook(note)
        run(schedule, model, settle)
        assert len(seen) >= 4 and len(set(seen)) == 1  # two forward steps, two forwards
        found.append(seen[0])
    assert found[0] == found[1] == (on, torch.bfloat16 if on else torch.float16)
    assert not torch.is_autocast_enabled("cuda")


# Weights that autocast has cast -------------------------------------------------------------------


def test_what_autocast_has_cast_is_dropped_after_a_segment() -> None:
    """Else it would be used again after the optimizer has changed the weight."""
    weight, x = torch.ones(2, 2).requires_grad_(), torch.ones(1, 2)
    with in_bf16():
        settings = Settings.now()
    with settings.autocasting():
        assert torch.equal(x @ weight, torch.full((1, 2), 2.0, dtype=torch.bfloat16))
    with torch.no_grad():
        weight.mul_(3.0)
    with settings.autocasting():
        assert torch.equal(x @ weight, torch.full((1, 2), 6.0, dtype=torch.bfloat16))
