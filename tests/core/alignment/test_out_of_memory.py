"""A step in which memory runs out is made once more with less; or it says why it was not."""

import contextlib
import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_prefix.errors import StepOutOfMemory
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.megatron.logged_losses import logged_losses
from megatron_prefix.run import agreement
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.failures import CONFIG, PLACES, Countdown, items, raised, run
from tests.harness.one_rank import change_rank, small_model
from tests.harness.steps import Contract, assert_bitwise

pytestmark = pytest.mark.usefixtures("on_one_rank")


class Once(Countdown):
    """Runs out of memory at the calls `at`, counted from 1."""

    def __init__(self, *at):
        super().__init__(torch.OutOfMemoryError, 0)
        self.calls, self.at = 0, at

    def __call__(self):
        self.calls += 1
        if self.calls in self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


@contextlib.contextmanager
def out_of_memory(model, place, *at):
    """Memory runs out at these calls; the model is as it was afterwards."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        PLACES[place][0](monkeypatch, model, Once(*at))
        yield


AGAIN = [
    ("a later forward of a layer", "retain", True), ("sending gK/gV", "auto", True),
    ("the last backward of the step", "offload", True),
    ("the last backward of the step", "auto", False),
]  # fmt: skip


@pytest.mark.parametrize(("place", "memory", "wrap_ddp"), AGAIN)
def test_the_step_is_made_again_and_is_exact(place, memory, wrap_ddp, caplog):
    model = small_model(wrap_ddp=wrap_ddp)
    schedule = PrefixSchedule(replace(CONFIG, memory=memory))
    expected = run(schedule, model)
    with out_of_memory(model, place, PLACES[place][1]), caplog.at_level(logging.WARNING):
        found = run(schedule, model)
    assert_bitwise(found, expected)
    assert "running the step again with every inner segment recomputed" in caplog.text
    assert schedule.report is not None and schedule.report.retried
    assert set(schedule.report.plan.policies) == {"recompute", "retain"}
    assert_bitwise(run(schedule, model), expected)
    assert not schedule.report.retried


def test_what_a_failed_attempt_has_counted_is_taken_back():
    """The experts' token counts, Megatron's log of losses, and random numbers of the loss."""
    options = dict(
        moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1,
    )  # fmt: skip

    class Noisy(Contract):
        def loss_func(self, batch):
            noise = torch.randn(())
            return Contract.loss_func(self, {**batch, "weight": batch["weight"] * noise})

    def step(at):
        forget_logged_losses()
        torch.manual_seed(7)
        model = small_model("tiny-moe", config_overrides=options)
        unwrap(model).config.finalize_model_grads_func = None  # else the counts are used up
        schedule = PrefixSchedule(CONFIG)
        with out_of_memory(model, "the last backward of the step", at):
            found = run(schedule, model, Noisy())
        assert schedule.report is not None and schedule.report.retried == (at is not None)
        counted = {
            name: buffer.clone()
            for name, buffer in unwrap(model).named_buffers()
            if "tokens_per_expert" in name
        }
        return found, {**counted, **logged_losses(), "random": torch.get_rng_state()}

    expected, state = step(None)
    found, again = step(16)
    assert_bitwise(found, expected)
    assert len(state) > 3 and state.keys() == again.keys()
    for name, value in state.items():
        assert torch.equal(value, again[name]), name
        assert value.double().abs().sum() > 0
    forget_logged_losses()


def test_twice_is_an_error_with_a_table(caplog):
    model, schedule = small_model(), PrefixSchedule(CONFIG)
    expected = run(schedule, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with out_of_memory(model, "a dense block", 11, 20):
        text = raised(StepOutOfMemory, run, schedule, model)
    first, *table = text.splitlines()
    assert first.startswith("out of device memory: CUDA out of memory; with all inner segments")
    assert "segment_tokens" in first and "Tried to allocate" not in first
    assert table[0].split()[:2] == ["rank", "peak"] and table[1].split()[0] == "0"
    assert "predicted memory on top of weights and gradients" in caplog.text
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert_bitwise(run(schedule, model), expected)


@pytest.mark.parametrize(("memory", "zeroes", "forward_only", "why"), [
    ("recompute", True, False, "nothing leaner is left"),
    ("retain", True, True, "nothing leaner is left"),
    ("retain", False, False, "gradients were not zero when the step"),  # as in accumulation
])  # fmt: skip
def test_what_cannot_be_made_again_says_why(memory, zeroes, forward_only, why):
    model, schedule = small_model(), PrefixSchedule(replace(CONFIG, memory=memory))
    expected = run(schedule, model)
    with out_of_memory(model, "a dense block", 11):
        if zeroes:
            steps.zero_gradients(model)
        call = partial(steps.call, schedule, Contract().step, model, items())
        assert why in raised(StepOutOfMemory, partial(call, forward_only=forward_only))
    assert_bitwise(run(schedule, model), expected)


def test_a_rank_that_others_wait_for_does_not_go_back_alone(monkeypatch):
    model, schedule = small_model(), PrefixSchedule(CONFIG)
    run(schedule, model)
    change_rank(monkeypatch, waiting=[SimpleNamespace(size=lambda: 2)])
    monkeypatch.setattr(agreement, "agree", lambda problem, *_: problem)
    with out_of_memory(model, "a dense block", 11):
        why = raised(StepOutOfMemory, run, schedule, model)
    assert "not tried again: other ranks wait in this step" in why
