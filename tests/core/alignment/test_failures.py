"""A step that fails leaves nothing behind, and the next one is exact, bit for bit."""

import functools
import gc
import weakref
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.timers import Timers
from torch import Tensor

from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.megatron.install import install
from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.read import suspend
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.arenas import Storages, offloaders, watch_arenas
from tests.harness.failures import CONFIG, PLACES, Countdown, Fault, items, raised, run
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract, assert_bitwise

pytestmark = pytest.mark.usefixtures("on_one_rank_frozen")


@dataclass
class Watch:
    """What a step made that must not outlive it."""

    arenas: Storages
    outputs: list[weakref.ref[Tensor]]

    def alive(self):
        """Numbers of K/V tensors and of outputs that are still there."""
        return self.arenas.num_alive, sum(ref() is not None for ref in self.outputs)


def num_tensors():
    """Tensors of this process that something still refers to."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.fixture
def watch(monkeypatch):
    found, stock = Watch(Storages(), []), SegmentInputs.call

    def call(*arguments, **options):
        output = stock(*arguments, **options)
        found.outputs.append(weakref.ref(output))
        return output

    watch_arenas(monkeypatch, found.arenas.add)
    monkeypatch.setattr(SegmentInputs, "call", call)
    return found


def assert_clean(hooks, model, watch):
    """Nothing of a step is left, without the help of the garbage collector."""
    assert hooks.current is None and suspend.running() is None
    assert "forward" not in vars(unwrap(model)) and "fork" not in vars(get_cuda_rng_tracker())
    assert unwrap(model).post_process is True
    assert all(group.is_last_microbatch for group in model.bucket_groups)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    assert watch.alive() == (0, 0)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


KINDS: dict[str, tuple[type[BaseException], str, str]] = {
    "a fault": (Fault, "none", "retain"),
    "recomputed": (Fault, "full", "retain"),
    "interrupted, offloaded": (KeyboardInterrupt, "none", "offload"),
}


class Trained(NamedTuple):
    """A model that has made steps, what takes its tensors to the host, and what a step gives."""

    model: Any
    schedule: PrefixSchedule
    offloading: list[Any]
    expected: tuple[Any, dict[str, Tensor]]


@pytest.fixture(scope="module")
def trained():
    """By kind; a model that nothing is left on may fail again and again."""

    @functools.cache
    def of(kind):
        _, recompute, memory = KINDS[kind]
        model = small_model(recompute=recompute)
        schedule = PrefixSchedule(replace(CONFIG, memory=memory))
        with pytest.MonkeyPatch.context() as monkeypatch:
            offloading = offloaders(monkeypatch)
            run(schedule, model)
            if memory == "offload":
                run(schedule, model)  # with the staging pool that the first step has asked for
        expected = run(PrefixSchedule(CONFIG), small_model(recompute=recompute))
        return Trained(model, schedule, offloading, expected)

    return of


FAILURES = [(place, [*KINDS][number % 3]) for number, place in enumerate(PLACES)]
"""Every place fails in one way, every third one in the same."""


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("place", "kind"), FAILURES)
def test_a_failed_step_leaves_nothing(place, kind, trained, watch):
    (error, _, memory), (inject, after) = KINDS[kind], PLACES[place]
    model, schedule, offloading, expected = trained(kind)
    hooks, before = install(model), num_tensors()
    with pytest.MonkeyPatch.context() as monkeypatch:
        inject(monkeypatch, model, Countdown(error, after))
        assert raised(error, run, schedule, model) == "injected"
        assert_clean(hooks, model, watch)
    assert num_tensors() == before
    assert len(offloading) == (memory == "offload")
    assert not any(one.pool.used_bytes for one in offloading)
    assert_bitwise(run(schedule, model), expected)
    assert watch.arenas.seen and len(watch.outputs) >= 12
    assert_clean(hooks, model, watch)


def test_a_failure_of_forward_only_leaves_nothing(trained, watch):
    model, schedule, _, expected = trained("a fault")
    with pytest.MonkeyPatch.context() as monkeypatch:
        inject, _ = PLACES["a later forward of a layer"]
        inject(monkeypatch, model, Countdown(Fault, 9))
        call = (schedule, Contract().step, model, items())
        raised(Fault, lambda: steps.call(*call, forward_only=True))
        assert_clean(install(model), model, watch)
    assert_bitwise(run(schedule, model), expected)


def test_timers_can_start_again_after_a_failure(trained, monkeypatch):
    model, schedule, _, expected = trained("a fault")
    timers = Timers(2, "minmax")
    monkeypatch.setattr(unwrap(model).config, "timers", timers)
    for place in ("the loss function", "a dense block", "the trainer's forward step"):
        inject, after = PLACES[place]
        with pytest.MonkeyPatch.context() as patch:
            inject(patch, model, Countdown(Fault, after))
            raised(Fault, run, schedule, model)
    assert_bitwise(run(schedule, model), expected)
    for name in ("forward-backward", "forward-compute"):
        assert timers(name).active_time() > 0
        timers(name).start()  # which raises where it runs


# --- Losses and data that are not as they should be -----------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_passed_on(value, trained):
    """Trainers skip such a step by what they see in loss and gradients; hiding it would train."""
    model, schedule, _, expected = trained("a fault")

    class Broken(Contract):
        def loss_func(self, batch):
            if batch["uid"] == 1:
                batch = {**batch, "weight": batch["weight"] * value}
            return Contract.loss_func(self, batch)

    logs, gradients = run(schedule, model, Broken())
    finite = [bool(log["loss"].isfinite()) for log in logs]
    assert finite == [uid != 1 for uid in range(6)]
    assert not any(gradient.isfinite().all() for gradient in gradients.values())
    assert_bitwise(run(schedule, model), expected)
