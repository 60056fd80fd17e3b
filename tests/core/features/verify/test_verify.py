"""`PrefixConfig.verify`: both schedules on one step; the trainer gets the stock schedule's. On
several ranks, what each has is compared, and all take the same way."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.across import step as across_step
from megatron_prefix.features.verify import gradients, logs
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.megatron.install import language_model
from megatron_prefix.megatron.logged_losses import logged_losses
from megatron_prefix.refusals.table import NOT_VERIFIED
from megatron_prefix.run import schedule as schedules
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.step_run import StepRun
from tests.harness import steps
from tests.harness.one_group import items, run, schedule_with
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
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
                store = super().run()
                layer = language_model(model).decoder.layers[1]
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


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        ([{"loss": 1.0}], [{"loss": 1.0}, {"loss": 1.0}]), ([{"loss": 1.0}], [{"lost": 1.0}]),
        ([{"loss": torch.ones(2)}], [{"loss": torch.ones(3)}]),
        ([{"loss": torch.ones(2)}], [{"loss": 1.0}]), ([{"num": 3}], [{"num": 4}]),
        ([{"loss": float("nan")}], [{"loss": 1.0}]),
        ([{"loss": torch.tensor(float("nan"))}], [{"loss": torch.tensor(1.0)}]),
    ],
)  # fmt: skip
def test_results_that_differ_in_kind_are_infinitely_far(ours, stock):
    error, size, _ = logs.stores(ours, stock, 1.0)
    assert logs.relative(error, size) == float("inf")


def wrong_on_the_last_rank(model):
    """A `StepRun` that adds an error to one gradient there, before reductions."""
    inner = unwrap(model)
    finalize = inner.config.finalize_model_grads_func

    def wrong(*args, **options):
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            inner.decoder.layers[-1].self_attention.linear_proj.weight.main_grad += 1.0
        finalize(*args, **options)

    class Faulty(StepRun):
        def run(self):
            inner.config.finalize_model_grads_func = wrong
            try:
                return super().run()
            finally:
                inner.config.finalize_model_grads_func = finalize

    return Faulty


def data(seed, num, *, alike):
    """A group of rollouts; or as many that have nothing in common."""
    if alike:
        items = steps.group(seed, num)
    else:
        items = [steps.group(100 + seed + number, 1)[0] for number in range(num)]
    return [{name: _shorter(value) for name, value in item.items()} for item in items]


def _shorter(value):
    """Without the last position: 16 are left, which tensor-parallel ranks share."""
    return value[:, :-1] if isinstance(value, torch.Tensor) else value


def train(layout, model, faulty, config):
    """A step of one rank: its gradients with `verify`, with stock, and the report."""
    world = runtime.initialize(layout)
    made = [small_model(layout=layout, dtype=torch.float64, **model) for _ in range(2)]
    if faulty:
        schedules.StepRun = wrong_on_the_last_rank(made[0])  # in this rank's process
    schedule = PrefixSchedule(
        PrefixConfig(
            **{"min_gain": 0, "kernel": "math", "verify": 1, "min_speedup": 1e-9, **config}
        )
    )
    shard = world.rank if layout.dp > 1 or layout.ep > 1 else 0
    # With experts the second rank shares nothing; it must run both schedules all the same.
    items = data(shard, 4, alike=shard == 0 or layout.ep == 1)
    gradients, verifications = [], []
    for chunk, function in zip(made, (schedule, stock_schedule()), strict=True):
        steps.run(function, Contract().step, chunk, items)
        gradients.append(
            [bucket.grad_data.clone() for group in chunk.bucket_groups for bucket in group.buckets]
        )
        verifications.append(schedule.report.features["verify"])
    assert unwrap(made[0]) is not unwrap(made[1])
    equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    return equal, verifications[0], schedule.report.decision.share


DDP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 20_000}


@pytest.mark.parametrize(
    ("layout", "model", "config"),
    [
        (Layout(dp=2), DDP, {"mode": "on"}),
        (Layout(pp=2), {}, {"mode": "on"}),
        (Layout(ep=2, dp=2), {"name": "tiny-moe"}, {"mode": "on"}),
    ],
    ids=["dp2, distributed optimizer", "pp2", "ep2"],
)
def test_each_rank_gets_stocks_gradients_and_all_agree(layout, model, config):
    for equal, verification, share in run_ranks(2, train, layout, model, False, config):
        assert equal
        assert share
        assert verification.failure == ""
        assert verification.worst["gradients"].units < 1


def test_what_is_wrong_on_one_rank_is_named_on_all():
    named = run_ranks(2, train, Layout(pp=2), {}, True, {"mode": "auto"})
    for equal, verification, share in named:
        assert equal
        assert not share
        assert "self_attention.linear_proj.weight" in verification.failure


def unreduced(sums_gradients):
    """A step with a model in no wrapper, and prompts that cross ranks all the same: how many
    positions crossed, and what `verify` says."""
    world = runtime.initialize(Layout(dp=2))
    if not sums_gradients:
        across_step._in_the_way = lambda *_: None  # in this process
    config = PrefixConfig(
        min_gain=0, kernel="math", verify=1, mode="auto", min_speedup=1e-9, across_ranks="on"
    )
    schedule = PrefixSchedule(config, Callbacks(sums_gradients=sums_gradients))
    model, contract = small_model(dtype=torch.float64, wrap_ddp=False), Contract(per_token=True)
    contract.configure(model)
    items = data(0, 4, alike=True)  # every rank has half of a group
    steps.call(schedule, contract.step, model, items[2 * world.rank : 2 * world.rank + 2])
    crossed = schedule.report.crossed
    return crossed.received_tokens if crossed else 0, schedule.report.features["verify"].failure


def test_gradients_that_nobody_sums_are_caught():
    for crossed, failure in run_ranks(2, unreduced, False):
        assert crossed > 0
        assert "gradients" in failure
