"""`PrefixConfig.verify`: both schedules on one step; the trainer gets the stock schedule's."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.verify import gradients, logs
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.megatron.install import language_model
from megatron_prefix.megatron.logged_losses import logged_losses
from megatron_prefix.refusals.table import NOT_VERIFIED
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.run.step_run import StepRun
from tests.harness import steps
from tests.harness.one_group import items, run, schedule_with
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract, assert_bitwise

pytestmark = pytest.mark.usefixtures("on_one_rank")


def verifying(mode="on", num=1, **fields):
    return schedule_with(mode=mode, verify=num, min_speedup=1e-9, **fields)


def stock_run(**options):
    return run(stock_schedule(), small_model(**options))


def test_results_are_stocks_and_a_line_says_so(caplog):
    schedule, model = verifying(num=2), small_model()
    expected = stock_run()
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            assert_bitwise(run(schedule, model), expected)
            assert schedule.report.features["verify"].failure == ""
            assert f"verify, update {number} of 2" in caplog.text
    worst = schedule.report.features["verify"].worst
    assert {"losses", "outputs", "gradients"} <= worst.keys()
    assert 0 < worst["gradients"].units < 1
    run(schedule, model)
    assert "verify" not in schedule.report.features
    assert schedule.report.decision.share


@pytest.fixture
def faulty(monkeypatch):
    """A schedule that adds to one gradient what nobody asked for, and a model."""

    def made(mode, error):
        model = small_model()

        class Faulty(StepRun):
            def run(self):
                store, layer = super().run(), language_model(model).decoder.layers[1]
                layer.mlp.linear_fc2.weight.main_grad[3, 4] += error
                return store

        monkeypatch.setattr("megatron_prefix.run.schedule.StepRun", Faulty)
        return verifying(mode), model

    return made


def test_a_wrong_gradient_is_named_and_its_kind_given_to_stock(faulty, caplog):
    schedule, model = faulty("auto", 1.0)
    expected = stock_run()
    assert_bitwise(run(schedule, model), expected)
    assert "decoder.layers.1.mlp.linear_fc2.weight" in schedule.report.features["verify"].failure
    assert NOT_VERIFIED.fix in caplog.text
    for _ in range(3):
        assert_bitwise(run(schedule, model), expected)
        assert not schedule.report.decision.share
    assert schedule.report.fallback_count == 4


def test_a_small_error_fails_in_fp64(faulty):
    schedule, model = faulty("on", 1e-8)
    with pytest.raises(CannotShare, match="gradients"):
        run(schedule, model)


def test_batches_that_are_overwritten_reach_stock_as_they_were():
    def step(data_iterator, model):
        batch = next(data_iterator)
        output, loss = Contract().step(iter([dict(batch)]), model)
        batch["weight"].mul_(2)  # twice would be wrong
        return output, loss

    schedule = verifying()
    found = steps.run(schedule, step, small_model(), items())
    assert schedule.report.features["verify"].failure == ""
    assert_bitwise(found, steps.run(stock_schedule(), step, small_model(), items()))


class Stubborn(Iterator[Any]):
    """Cannot be copied: neither it nor its batches."""

    def __init__(self, data):
        self._data = iter(data)

    def __next__(self):
        return {**next(self._data), "lock": (_ for _ in ())}


def test_what_cannot_be_drawn_again_is_shared_unverified(caplog):
    model, schedule = small_model(), verifying()
    for _ in range(2):
        steps.run(schedule, Contract().step, model, items(), data_iterator=Stubborn(items()))
        assert schedule.report.decision.share
        assert "verify" not in schedule.report.features
    assert caplog.text.count("cannot be compared") == 1


@pytest.mark.parametrize("place", ["host", "sketch"])
def test_gradients_may_be_kept_elsewhere(monkeypatch, faulty, place):
    monkeypatch.setattr(gradients, "place_for", lambda rank: place)
    schedule, model = verifying(), small_model()
    assert_bitwise(run(schedule, model), stock_run())
    assert 0 < schedule.report.features["verify"].worst["gradients"].units < 1
    schedule, model = faulty("on", 1.0)
    with pytest.raises(CannotShare, match=r"linear_fc2\.weight"):
        run(schedule, model)


def test_norms_are_those_of_all_experts_of_a_layer(monkeypatch):
    values = {f"experts.linear_fc1.weight{n}": torch.tensor([n + 3.0]) for n in range(2)}
    monkeypatch.setattr(gradients, "gradients", lambda rank: iter(values.items()))
    monkeypatch.setattr(gradients, "_left_to_sum", lambda rank: None)
    monkeypatch.setattr(gradients, "place_for", lambda rank: "device")
    kept = gradients.KeptGradients(SimpleNamespace(device=torch.device("cpu")), by_norm=True)
    values |= {name: 2 * value for name, value in values.items()}
    assert kept.differences() == [("experts.linear_fc1.weight*", 5.0, 10.0)]


@pytest.mark.parametrize(
    ("name", "spec"), [("tiny-moe", {}), ("tiny-llama", {"mtp_num_layers": 1})]
)
def test_routers_and_further_tokens_are_stocks(name, spec):
    found = []
    for schedule in (verifying(), stock_schedule()):
        forget_logged_losses()
        for values in logs.logged_ahead().values():
            values.zero_()
        model = small_model(name, spec=spec)
        result = run(schedule, model)
        logged = {**logged_losses(), **logs.logged_ahead()}
        found.append((result, {key: value.clone() for key, value in logged.items()}))
        if isinstance(schedule, PrefixSchedule):
            worst = schedule.report.features["verify"].worst
            assert worst["auxiliary losses"].units < 1
    assert_bitwise(found[0][0], found[1][0], may_vanish=True)  # some experts get no token
    assert found[0][1].keys() == found[1][1].keys()
    assert all(torch.equal(found[0][1][key], value) for key, value in found[1][1].items())


@pytest.mark.parametrize(("ours", "stock"), [
    ([{"loss": 1.0}], [{"loss": 1.0}, {"loss": 1.0}]), ([{"loss": 1.0}], [{"lost": 1.0}]),
    ([{"loss": torch.ones(2)}], [{"loss": torch.ones(3)}]),
    ([{"loss": torch.ones(2)}], [{"loss": 1.0}]), ([{"num": 3}], [{"num": 4}]),
    ([{"loss": float("nan")}], [{"loss": 1.0}]),
    ([{"loss": torch.tensor(float("nan"))}], [{"loss": torch.tensor(1.0)}]),
])  # fmt: skip
def test_results_that_differ_in_kind_are_infinitely_far(ours, stock):
    error, size, _ = logs.stores(ours, stock, 1.0)
    assert logs.relative(error, size) == float("inf")
