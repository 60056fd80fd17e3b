"""A forward step that is suspended in its model call: what it sees, and what is seen outside."""

import contextvars
import functools
import random
import sys
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.cuda.amp import common
from torch.overrides import TorchFunctionMode

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.run.read import forward_step_state, suspend
from megatron_prefix.run.read.data_iterators import RepeatedIterators
from megatron_prefix.run.read.forward_step_state import Settings
from megatron_prefix.run.read.loss_variables import LossVariables
from megatron_prefix.run.read.random_numbers import saved_generators
from megatron_prefix.run.read.suspend import SuspendedStep
from tests.harness import steps
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")


def call(value="call"):
    """What the hooked model does."""
    step = suspend.running()
    return step.pause(value, lambda: "the model's own")


def suspended(function, *swaps):
    step = SuspendedStep(function, None, swaps)
    step.start()
    return step


def test_a_step_stops_at_its_call_and_goes_on_with_the_answer():
    seen = []

    def function():
        seen.append("before")
        seen.append(call())
        return "result"

    step = suspended(function)
    assert seen == ["before"] and step.call == "call" and suspend.running() is None
    assert step.resume(lambda: 7) == "result"
    assert seen == ["before", 7] and suspend.running() is None


def test_settings_nest_as_in_a_plain_call():
    """What is set around the call is the step's own, and outside it is as before."""
    variable = contextvars.ContextVar("variable", default=0)
    seen = []

    def function():
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
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [
    _Mode,
    torch.inference_mode,
    lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
])  # fmt: skip
def test_what_cannot_be_taken_off_is_refused(make):
    def function():
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
    def is_fp8_enabled(cls):
        return cls.is_on

    def __enter__(self):
        type(self).is_on = True

    def __exit__(self, *_):
        type(self).is_on = False


@pytest.mark.parametrize("name", ["fp8", "quantization"])
def test_quantised_calls_are_refused(monkeypatch, name):
    module = SimpleNamespace(FP8GlobalStateManager=_Quantised)
    monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{name}", module)

    def function():
        with _Quantised():
            call()

    with pytest.raises(UserError, match="inside transformer-engine's fp8 autocast: leave it out"):
        SuspendedStep(function, None).start()
    assert not _Quantised.is_on
    model = small_model()
    with _Quantised(), pytest.raises(UserError, match="autocast is on around the schedule: leave"):
        steps.call(
            PrefixSchedule(PrefixConfig(mode="on")), steps.Contract().step, model, steps.group(0, 2)
        )


def test_the_models_mode_is_put_back_and_set_again():
    model, seen = small_model(), []

    def function():
        model.eval()
        call()
        seen.append(any(module.training for module in model.modules()))
        model.train()

    step = suspended(function, forward_step_state.training_modes(model))
    assert step.kept[0] is not None and all(module.training for module in model.modules())
    step.resume(lambda: None)
    assert seen == [False] and all(module.training for module in model.modules())


def test_forks_of_the_random_tracker_nest():
    """What a step draws does not depend on what is drawn while it is suspended."""
    tracker = get_cuda_rng_tracker()

    def function():
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


# Data iterators: what is drawn from them is told, and can be drawn twice --------------------------


class Source(Iterator[Any]):
    """A trainer's, with an attribute and a method."""

    name = "source"

    def __init__(self, items):
        self._items = iter(items)

    def __next__(self):
        return next(self._items)

    def peek(self):
        """It might draw."""


def batches():
    return [{"tokens": torch.full((2,), number)} for number in range(4)]


def drawn(iterator, num):
    return [batch["tokens"].tolist() for batch in islice(iterator, num)]


@pytest.mark.parametrize("copies", [False, True])
def test_the_same_is_drawn_again_and_then_the_rest(copies):
    source = Source(batches())
    iterators = RepeatedIterators([source, source], copies=copies)
    first, same = iterators.first
    assert first is same and first.name == "source"
    assert drawn(first, 2) == [[0, 0], [1, 1]]
    again, _ = iterators.again()
    assert drawn(again, 9) == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert not iterators.problem


def rolled():
    """Batches of numbers from all generators of the host."""
    while True:
        number = torch.rand(1).item() + np.random.rand() + random.random()
        yield {"tokens": torch.tensor([number], dtype=torch.float64)}


@pytest.mark.parametrize("copies", [False, True])
def test_random_numbers_of_batches_go_on_behind_a_second_time(copies):
    """Else the next step draws what this one has drawn."""
    put_back = saved_generators(torch.device("cpu"))
    expected = drawn(rolled(), 4)
    put_back()
    iterators = RepeatedIterators(rolled(), copies=copies)
    assert drawn(iterators.first, 2) == expected[:2]
    put_back()
    assert drawn(iterators.again(), 2) == expected[:2]
    assert drawn(rolled(), 2) == expected[2:]


@pytest.mark.parametrize("copies", [False, True])
def test_an_object_that_counts_begins_anew(copies):
    source = SimpleNamespace(place=0)
    iterators = RepeatedIterators(source, copies=copies)
    iterators.first.place += 3
    assert source.place == (0 if copies else 3)
    assert iterators.again() is source and source.place == 0


def test_an_iterator_that_is_asked_for_more_is_a_problem():
    iterators = RepeatedIterators(Source([1]), copies=True)
    iterators.first.peek()
    assert iterators.problem == "the data iterator is asked for peek"


# What forward steps keep for their losses outside of their own variables --------------------------


def test_afterwards_the_last_steps_bindings_stay():
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


# Autocast of the model's configuration ------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False])
def test_forward_steps_and_segments_see_the_configs_autocast(monkeypatch, on):
    """As in Megatron's schedule.  Autocast for CUDA is a setting that the CPU has, too, once torch
    does not ask for a GPU."""
    monkeypatch.setattr(common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    found = []
    for schedule in (
        stock_schedule(),
        PrefixSchedule(PrefixConfig(mode="on", kernel="math", min_gain=0)),
    ):
        model = small_model()
        config = unwrap(model).config
        config.enable_autocast, config.autocast_dtype = on, torch.bfloat16
        seen = []

        def note(*_, seen=seen):
            seen.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))

        def step(iterator, model, note=note):
            note()
            return steps.Contract().step(iterator, model)

        unwrap(model).decoder.register_forward_pre_hook(note)
        steps.call(schedule, step, model, steps.group(0, 2))
        assert len(seen) >= 4 and len(set(seen)) == 1  # two forward steps, two forwards
        found.append(seen[0])
    assert found[0] == found[1] == (on, torch.bfloat16 if on else torch.float16)
    assert not torch.is_autocast_enabled("cuda")
