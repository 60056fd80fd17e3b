"""A forward step that is suspended in its model call: what it sees, and what is seen outside."""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.overrides import TorchFunctionMode

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.features.replay.swaps import replayed_routes
from megatron_prefix.run.read import forward_step_state, suspend
from megatron_prefix.run.read.forward_step_state import Settings
from megatron_prefix.run.read.suspend import SuspendedStep
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def call(value: Any = "call") -> Any:
    """What the hooked model does."""
    step = suspend.running()
    assert step is not None
    return step.pause(value, lambda: "the model's own")


def suspended(function: Any, *swaps: Any) -> SuspendedStep:
    step = SuspendedStep(function, None, swaps)
    step.start()
    return step


def test_a_step_stops_at_its_call_and_goes_on_with_the_answer() -> None:
    seen: list[Any] = []

    def function() -> str:
        seen.append("before")
        seen.append(call())
        return "result"

    step = suspended(function)
    assert seen == ["before"] and step.call == "call" and suspend.running() is None
    assert step.resume(lambda: 7) == "result"
    assert seen == ["before", 7] and suspend.running() is None


def test_without_an_answer_the_model_runs() -> None:
    assert suspended(call).run_model() == "the model's own"


def test_steps_end_in_any_order() -> None:
    several = [suspended(lambda n=n: (n, call())) for n in range(4)]
    assert [several[n].resume(lambda n=n: -n) for n in (2, 0, 3, 1)] == [
        (2, -2), (0, 0), (3, -3), (1, -1)
    ]  # fmt: skip


def test_closing_runs_finally_blocks_and_nothing_else() -> None:
    ended: list[str] = []

    def function() -> None:
        try:
            call()
            ended.append("went on")
        finally:
            ended.append("finally")

    step = suspended(function)
    step.close()
    step.close()
    assert ended == ["finally"]


@pytest.mark.parametrize("where", ["before", "after"])
def test_errors_of_a_step_come_out_where_it_is_run(where: str) -> None:
    def function() -> None:
        if where == "before":
            raise KeyError("x")
        call()
        raise KeyError("x")

    step = SuspendedStep(function, None)
    if where == "after":
        step.start()
    with pytest.raises(KeyError):
        step.start() if where == "before" else step.resume(lambda: None)
    assert suspend.running() is None


def test_a_step_that_does_not_call_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="does not call the model"):
        SuspendedStep(lambda: 1, None).start()


def test_settings_nest_as_in_a_plain_call() -> None:
    """What is set around the call is the step's own, and outside it is as before."""
    variable = contextvars.ContextVar("variable", default=0)
    seen = []

    def function() -> None:
        variable.set(5)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            call()
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            seen.append(variable.get())
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    before = Settings.now()
    step = suspended(function)
    assert Settings.now() == before and variable.get() == 0
    assert step.called.grad is False and step.called.autocast[0] == (True, torch.bfloat16)
    with step.called.autocasting():
        assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    with torch.no_grad():
        step.resume(lambda: seen.append(torch.is_grad_enabled()))
    assert Settings.now() == before
    assert seen == [False, (False, True), 5, (True, False)]
    assert step.called.autocast[0] == (True, torch.bfloat16)  # and not those of its end


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "make",
    [
        _Mode,
        torch.inference_mode,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ],
)
def test_what_cannot_be_taken_off_is_refused(make: Any) -> None:
    def function() -> None:
        with make():
            call()

    before = forward_step_state.fixed()
    with pytest.raises(UserError, match="cannot be suspended: enter it before"):
        SuspendedStep(function, None).start()
    assert forward_step_state.fixed() == before
    with make():
        step = suspended(call)  # the schedule is called inside of it
        assert step.resume(lambda: 3) == 3


class _Quantised:
    """As `fp8_autocast` and `FP8GlobalStateManager` of transformer-engine."""

    is_on = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.is_on

    def __enter__(self) -> None:
        type(self).is_on = True

    def __exit__(self, *_: object) -> None:
        type(self).is_on = False


@pytest.mark.parametrize("name", ["fp8", "quantization"])
def test_quantised_calls_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = SimpleNamespace(FP8GlobalStateManager=_Quantised)
    monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{name}", module)

    def function() -> None:
        with _Quantised():
            call()

    with pytest.raises(UserError, match="inside transformer-engine's fp8 autocast: leave it out"):
        SuspendedStep(function, None).start()
    assert not _Quantised.is_on
    model = small_model()
    with _Quantised(), pytest.raises(UserError, match="autocast is on around the schedule: leave"):
        steps.call(
            PrefixSchedule(PrefixConfig(mode="on")), Contract().step, model, steps.group(0, 2)
        )


def test_the_models_mode_is_put_back_and_set_again() -> None:
    model = small_model()
    seen = []

    def function() -> None:
        model.eval()
        call()
        seen.append(any(module.training for module in model.modules()))
        model.train()

    step = suspended(function, forward_step_state.training_modes(model))
    assert step.kept[0] is not None and all(module.training for module in model.modules())
    step.resume(lambda: None)
    assert seen == [False] and all(module.training for module in model.modules())


def test_forks_of_the_random_tracker_nest() -> None:
    """What a step draws does not depend on what is drawn while it is suspended."""
    tracker = get_cuda_rng_tracker()

    def function() -> list[torch.Tensor]:
        found = [torch.rand(3)]
        with tracker.fork():
            found.append(torch.rand(3))
            call()
            found.append(torch.rand(3))
        return [*found, torch.rand(3)]

    torch.manual_seed(3)
    states_before = {name: state.clone() for name, state in tracker.get_states().items()}
    plain = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "call", lambda: None)
        plain = function()
        after = torch.rand(3)
    torch.manual_seed(3)
    tracker.set_states(states_before)
    with forward_step_state.watched_forks() as forks:
        step = suspended(function, forks)
        outside = torch.get_rng_state()
        found = step.resume(lambda: None)
    assert torch.equal(outside, torch.get_rng_state()) is False  # the step has drawn once more
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert torch.equal(torch.rand(3), after) and "fork" not in vars(tracker)


def test_a_fork_inside_a_fork_goes_on_drawing() -> None:
    tracker = get_cuda_rng_tracker()

    def draws() -> list[torch.Tensor]:
        found = []
        with tracker.fork():
            for _ in range(2):
                with tracker.fork():
                    found.append(torch.rand(1))
            found.append(torch.rand(1))
        return found

    saved = {name: state.clone() for name, state in tracker.get_states().items()}
    plain = draws()
    tracker.set_states(saved)
    with forward_step_state.watched_forks():
        assert all(torch.equal(a, b) for a, b in zip(draws(), plain, strict=True))


def test_variables_of_the_environment_are_each_steps_own(monkeypatch) -> None:
    monkeypatch.setenv("STAGE", "outside")

    def function() -> str:
        os.environ["STAGE"] = "inside"
        call()
        found = os.environ["STAGE"]
        os.environ["STAGE"] = "outside"
        return found

    steps = [suspended(function, forward_step_state.environment()) for _ in range(2)]
    assert os.environ["STAGE"] == "outside"
    assert [step.run_model() for step in steps] == ["inside", "inside"]
    assert os.environ["STAGE"] == "outside"


class _Router:
    class router_replay:  # noqa: N801  # Megatron's name
        pass

    def __init__(self) -> None:
        self.router_replay: Any = _Router.router_replay()  # type: ignore[no-redef]
        self.router_replay.target = None


def test_routes_to_follow_are_each_steps_own() -> None:
    router = _Router()
    swap = replayed_routes([router])

    def function(number: int) -> Any:
        router.router_replay.target = number
        call()
        return router.router_replay.target

    steps = [suspended(lambda n=n: function(n), swap) for n in (1, 2)]
    assert [step.run_model() for step in steps] == [1, 2]
