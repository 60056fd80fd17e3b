"""`PrefixConfig.verify`: both schedules on one step; the trainer gets the stock schedule's."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator
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
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.model_state import StateOfSteps
from megatron_prefix.run.read.random_numbers import SegmentRandomUse
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.run.step_run import StepRun
from tests.harness import steps
from tests.harness.one_group import assert_bitwise, items, run, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def verifying(mode: str = "on", num: int = 1, **fields: Any) -> PrefixSchedule:
    return schedule_with(mode=mode, verify=num, min_speedup=1e-9, **fields)


def stock_run(**options: Any) -> Any:
    return run(stock_schedule(), small_model(**options))


def test_results_are_stocks_and_a_line_says_so(caplog) -> None:
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
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A schedule that adds to one gradient what nobody asked for, and a model."""

    def made(mode: str, error: float) -> tuple[PrefixSchedule, Any]:
        model = small_model()

        class Faulty(StepRun):
            def run(self) -> Any:
                store = super().run()
                layer = language_model(model).decoder.layers[1]
                layer.mlp.linear_fc2.weight.main_grad[3, 4] += error
                return store

        monkeypatch.setattr("megatron_prefix.run.schedule.StepRun", Faulty)
        return verifying(mode), model

    return made


def test_a_wrong_gradient_is_named_and_its_kind_given_to_stock(faulty, caplog) -> None:
    schedule, model = faulty("auto", 1.0)
    expected = stock_run()
    assert_bitwise(run(schedule, model), expected)
    assert "decoder.layers.1.mlp.linear_fc2.weight" in schedule.report.features["verify"].failure
    assert NOT_VERIFIED.fix in caplog.text
    for _ in range(3):
        assert_bitwise(run(schedule, model), expected)
        assert not schedule.report.decision.share
    assert schedule.report.fallback_count == 4


def test_mode_on_raises_it(faulty) -> None:
    schedule, model = faulty("on", 1.0)
    with pytest.raises(CannotShare, match=r"decoder\.layers\.1\.mlp\.linear_fc2\.weight"):
        run(schedule, model)


def test_nan_fails(faulty) -> None:
    schedule, model = faulty("on", float("nan"))
    with pytest.raises(CannotShare, match=r"linear_fc2\.weight inf"):
        run(schedule, model)


def test_a_small_error_fails_in_fp64(faulty) -> None:
    schedule, model = faulty("on", 1e-8)
    with pytest.raises(CannotShare, match="gradients"):
        run(schedule, model)


def test_gradients_that_were_there_before_are_added_to() -> None:
    """As a trainer's does that calls the schedule several times before it steps."""
    model, plain = small_model(), small_model()
    found = []
    for schedule, one in ((verifying(num=2), model), (stock_schedule(), plain)):
        steps.zero_gradients(one)
        for data in (items(), items(4, 9)):
            steps.call(schedule, Contract().step, one, data)
        found.append(steps.gradients(one))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], gradient) for name, gradient in found[1].items())


def test_random_numbers_of_a_step_are_stocks() -> None:
    """Losses draw; the step after it draws what it would have drawn without us."""

    def step(data_iterator: Iterator[Any], model: Any) -> Any:
        output, loss = Contract().step(data_iterator, model)

        def noisy(value: torch.Tensor) -> Any:
            return loss(value * (1 + torch.rand(()).item() + random.random()))

        return output, noisy

    found = []
    for schedule in (verifying(), stock_schedule()):
        torch.manual_seed(3)
        random.seed(3)
        model = small_model()
        torch.manual_seed(3)
        steps.zero_gradients(model)
        logs = steps.call(schedule, step, model, items())
        found.append(((logs, steps.gradients(model)), torch.rand(()).item(), random.random()))
    assert_bitwise(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


class Batches:
    """slime's: no iterator, but an object that keeps its place."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.place = data, 0

    def get_next(self) -> Any:
        self.place += 1
        return self.data[self.place - 1]


def own_step(source: Any, model: Any) -> Any:
    return Contract().step(iter([source.get_next()]), model)


def test_an_object_that_keeps_its_place_is_read_once() -> None:
    model, batches = small_model(), Batches(items())
    steps.zero_gradients(model)
    schedule = verifying()
    arguments = {"model": model, "num_microbatches": 5, "seq_length": 17, "micro_batch_size": 1}
    logs = schedule(
        forward_step_func=own_step, data_iterator=batches, forward_only=False, **arguments
    )
    assert schedule.report.features["verify"].failure == ""
    assert batches.place == 5
    assert_bitwise((logs, steps.gradients(model)), stock_run())


def test_batches_that_are_overwritten_reach_stock_as_they_were() -> None:
    def step(data_iterator: Iterator[Any], model: Any) -> Any:
        batch = next(data_iterator)
        output, loss = Contract().step(iter([dict(batch)]), model)
        batch["weight"].mul_(2)  # twice would be wrong
        return output, loss

    model, schedule = small_model(), verifying()
    steps.zero_gradients(model)
    logs = steps.call(schedule, step, model, items())
    assert schedule.report.features["verify"].failure == ""
    plain = small_model()
    steps.zero_gradients(plain)
    expected = steps.call(stock_schedule(), step, plain, items())
    assert_bitwise((logs, steps.gradients(model)), (expected, steps.gradients(plain)))


def test_what_losses_gather_is_there_once() -> None:
    """A list of outputs beside the forward step, and a counter: AReaL's and others'."""
    outputs: list[torch.Tensor] = []
    num = 0

    def step(data_iterator: Iterator[Any], model: Any) -> Any:
        output, loss = Contract().step(data_iterator, model)

        def gathering(value: torch.Tensor) -> Any:
            nonlocal num
            num += 1
            outputs.append(value.detach())
            return loss(value)

        return output, gathering

    schedule, model = verifying(), small_model()
    steps.zero_gradients(model)
    steps.call(schedule, step, model, items())
    assert schedule.report.features["verify"].failure == ""
    assert (len(outputs), num) == (5, 5)


class Stubborn(Iterator[Any]):
    """Cannot be copied: neither it nor its batches."""

    def __init__(self, data: list[Any]) -> None:
        self._data = iter(data)

    def __next__(self) -> Any:
        return {**next(self._data), "lock": (_ for _ in ())}


def test_what_cannot_be_drawn_again_is_shared_unverified(caplog) -> None:
    model, schedule = small_model(), verifying()
    for _ in range(2):
        steps.zero_gradients(model)
        schedule(
            forward_step_func=Contract().step, data_iterator=Stubborn(items()), model=model,
            num_microbatches=5, seq_length=17, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        assert schedule.report.decision.share
        assert "verify" not in schedule.report.features
    assert caplog.text.count("cannot be compared") == 1


def test_a_pass_without_gradients_is_compared_too() -> None:
    model, plain, schedule = small_model(), small_model(), verifying()
    with torch.no_grad():
        logs = steps.call(schedule, Contract().step, model, items(), forward_only=True)
        expected = steps.call(stock_schedule(), Contract().step, plain, items(), forward_only=True)
    assert [log["loss"].item() for log in logs] == [log["loss"].item() for log in expected]
    worst = schedule.report.features["verify"].worst
    assert schedule.report.features["verify"].failure == ""
    assert {"losses", "outputs"} == worst.keys()


@pytest.mark.parametrize("place", ["host", "sketch"])
def test_gradients_may_be_kept_elsewhere(monkeypatch, faulty, place) -> None:
    monkeypatch.setattr(gradients, "place_for", lambda rank: place)
    schedule, model = verifying(), small_model()
    assert_bitwise(run(schedule, model), stock_run())
    assert 0 < schedule.report.features["verify"].worst["gradients"].units < 1
    schedule, model = faulty("on", 1.0)
    with pytest.raises(CannotShare, match=r"linear_fc2\.weight"):
        run(schedule, model)


@pytest.mark.parametrize(
    ("name", "spec"), [("tiny-moe", {}), ("tiny-llama", {"mtp_num_layers": 1})]
)
def test_routers_and_further_tokens_are_stocks(name, spec) -> None:
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
    assert_bitwise(found[0][0], found[1][0])
    assert found[0][1].keys() == found[1][1].keys()
    assert all(torch.equal(found[0][1][key], value) for key, value in found[1][1].items())


def test_nested_results_are_compared_by_their_values() -> None:
    def nested(scale: float) -> Any:
        parts = [torch.ones(3) * scale, torch.ones(2)]
        return [{"values": torch.nested.nested_tensor(parts, layout=torch.jagged)}]

    assert logs.stores(nested(1.0), nested(1.0), 1.0)[0] == 0
    assert logs.stores(nested(1.5), nested(1.0), 1.0)[0] == 0.5


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        ([{"loss": 1.0}], [{"loss": 1.0}, {"loss": 1.0}]),
        ([{"loss": 1.0}], [{"lost": 1.0}]),
        ([{"loss": torch.ones(2)}], [{"loss": torch.ones(3)}]),
        ([{"loss": torch.ones(2)}], [{"loss": 1.0}]),
        ([{"num": 3}], [{"num": 4}]),
        ([{"loss": float("nan")}], [{"loss": 1.0}]),
        ([{"loss": torch.tensor(float("nan"))}], [{"loss": torch.tensor(1.0)}]),
    ],
)
def test_results_that_differ_in_kind_are_infinitely_far(ours, stock) -> None:
    error, size, _ = logs.stores(ours, stock, 1.0)
    assert logs.relative(error, size) == float("inf")


def changing(change: Callable[[int], None]) -> Callable[..., Any]:
    """A forward step that changes something for each of its microbatches."""
    numbers = itertools.count()

    def step(data_iterator: Iterator[Any], wrapped: Any) -> Any:
        change(next(numbers) % 5)
        return Contract().step(data_iterator, wrapped)

    return step


def disproved(
    schedule: PrefixSchedule, step: Callable[..., Any], model: Any, **options: Any
) -> str:
    """What `verify` says of a step that differs."""
    steps.zero_gradients(model)
    with pytest.raises(CannotShare):
        steps.call(schedule, step, model, items(), **options)
    return str(schedule.report.features["verify"].failure)


def test_state_of_a_microbatch_that_nothing_notices_is_caught(monkeypatch) -> None:
    """As if no state were compared: an adapter's slot."""
    monkeypatch.setattr(StateOfSteps, "check", lambda *_: None)
    model = small_model()
    mlp = language_model(model).decoder.layers[0].mlp
    mlp.slot = 0
    mlp.register_forward_hook(lambda m, _, out: (out[0] * (1 + 0.1 * m.slot), out[1]))
    step = changing(lambda number: setattr(mlp, "slot", number))
    assert "gradients" in disproved(verifying(), step, model)


def test_noise_that_nothing_notices_is_caught(monkeypatch) -> None:
    monkeypatch.setattr(SegmentRandomUse, "checking", lambda _: contextlib.nullcontext())
    model = small_model()
    mlp = language_model(model).decoder.layers[0].mlp
    mlp.register_forward_hook(lambda _, __, out: (out[0] + torch.rand_like(out[0]), out[1]))
    assert "gradients" in disproved(verifying(), Contract().step, model)


def test_routers_that_do_not_count_are_caught(monkeypatch) -> None:
    """In calls with forward_only where gradients are enabled; segments run without."""
    monkeypatch.setattr(Rank, "counts_without_backward", False)
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    model = small_model("tiny-moe", config_overrides=bias)
    failure = disproved(verifying(), Contract().step, model, forward_only=True)
    assert "expert biases" in failure


@pytest.mark.parametrize("noticed", [True, False])
def test_scales_that_are_taken_for_constant_are_caught(monkeypatch, noticed) -> None:
    """Of routers' losses: the last microbatch's for all."""
    if not noticed:
        monkeypatch.setattr(Rank, "scales_auxiliary_losses", False)
    scale = 1.0

    def step(data_iterator: Iterator[Any], wrapped: Any) -> Any:
        nonlocal scale
        batch = next(data_iterator)
        scale = 1.0 + batch["uid"]
        return Contract().step(iter([batch]), wrapped)

    model = small_model("tiny-moe")
    language_model(model).config.grad_scale_func = lambda loss: loss * scale
    if noticed:
        steps.zero_gradients(model)
        schedule = verifying()
        steps.call(schedule, step, model, items())
        assert schedule.report.features["verify"].failure == ""
    else:
        assert "gradients" in disproved(verifying(), step, model)
