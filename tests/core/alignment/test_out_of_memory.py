"""A step in which memory runs out is made once more with less; or it says why it was not."""

import logging
from dataclasses import replace
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
from tests.harness.failures import CONFIG, PLACES, Countdown, assert_same, items, raised, run
from tests.harness.one_rank import change_rank, small_model
from tests.harness.steps import Contract

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


def out_of_memory(monkeypatch, model, place, *at):
    PLACES[place][0](monkeypatch, model, Once(*at))


AGAIN = [
    ("a later forward of a layer", "retain"),
    ("sending gK/gV", "auto"),
    ("the last backward of the step", "offload"),
]


@pytest.mark.parametrize(("place", "memory"), AGAIN)
def test_the_step_is_made_again_and_is_exact(place, memory, caplog):
    model = small_model()
    schedule = PrefixSchedule(replace(CONFIG, memory=memory))
    expected = run(schedule, model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        out_of_memory(monkeypatch, model, place, PLACES[place][1])
        with caplog.at_level(logging.WARNING):
            found = run(schedule, model)
    assert_same(found, expected)
    assert "running the step again with every inner segment recomputed" in caplog.text
    assert schedule.report is not None and schedule.report.retried
    assert set(schedule.report.plan.policies) == {"recompute", "retain"}
    assert_same(run(schedule, model), expected)
    assert not schedule.report.retried


def test_what_a_failed_attempt_has_counted_is_taken_back():
    """The experts' token counts, Megatron's log of losses, and random numbers of the loss."""
    options = dict(
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.1,
    )

    class Noisy(Contract):
        def loss_func(self, batch):
            noise = torch.randn(())
            return Contract.loss_func(self, {**batch, "weight": batch["weight"] * noise})

    def step(at):
        forget_logged_losses()
        torch.manual_seed(7)
        model = small_model("tiny-moe", config_overrides=options)
        unwrap(model).config.finalize_model_grads_func = None  # else the counts are used up
        with pytest.MonkeyPatch.context() as monkeypatch:
            if at is not None:
                out_of_memory(monkeypatch, model, "the last backward of the step", at)
            schedule = PrefixSchedule(CONFIG)
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
    assert_same(found, expected)
    assert len(state) > 3 and state.keys() == again.keys()
    for name, value in state.items():
        assert torch.equal(value, again[name]), name
        assert value.double().abs().sum() > 0
    forget_logged_losses()


def test_twice_is_an_error_with_a_table(caplog):
    model = small_model()
    schedule = PrefixSchedule(CONFIG)
    expected = run(schedule, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        out_of_memory(monkeypatch, model, "a dense block", 11, 20)
        text = raised(StepOutOfMemory, run, schedule, model)
    first, *table = text.splitlines()
    assert first.startswith("out of device memory: CUDA out of memory; with all inner segments")
    assert "segment_tokens" in first and "Tried to allocate" not in first
    assert table[0].split()[:2] == ["rank", "peak"] and table[1].split()[0] == "0"
    assert "predicted memory on top of weights and gradients" in caplog.text
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert_same(run(schedule, model), expected)


@pytest.mark.parametrize(
    ("memory", "why"),
    [("recompute", "nothing leaner is left"), ("retain", "gradients were not zero when the step")],
)
def test_what_cannot_be_made_again_says_why(memory, why):
    model = small_model()
    schedule = PrefixSchedule(replace(CONFIG, memory=memory))
    expected = run(schedule, model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        out_of_memory(monkeypatch, model, "a dense block", 11)
        if memory == "recompute":
            steps.zero_gradients(model)  # else the last step's are left, as in accumulation
        call = (schedule, Contract().step, model, items())
        assert why in raised(StepOutOfMemory, steps.call, *call)
    assert_same(run(schedule, model), expected)


def test_a_rank_that_others_wait_for_does_not_go_back_alone(monkeypatch):
    model = small_model()
    schedule = PrefixSchedule(CONFIG)
    run(schedule, model)
    change_rank(monkeypatch, waiting=[SimpleNamespace(size=lambda: 2)])
    monkeypatch.setattr(agreement, "agree", lambda problem, *_: problem)
    out_of_memory(monkeypatch, model, "a dense block", 11)
    assert "not tried again: other ranks wait in this step" in raised(
        StepOutOfMemory, run, schedule, model
    )


def test_gradients_without_ddp():
    model = small_model(wrap_ddp=False)
    schedule = PrefixSchedule(CONFIG)
    expected = run(schedule, model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        out_of_memory(monkeypatch, model, "the last backward of the step", 16)
        assert_same(run(schedule, model), expected)
        assert schedule.report is not None and schedule.report.retried


def test_without_gradients_there_is_nothing_leaner():
    model = small_model()
    schedule = PrefixSchedule(CONFIG)
    with pytest.MonkeyPatch.context() as monkeypatch:
        out_of_memory(monkeypatch, model, "a dense block", 11)
        call = (schedule, Contract().step, model, items())
        text = raised(StepOutOfMemory, lambda: steps.call(*call, forward_only=True))
    assert "nothing leaner is left" in text
