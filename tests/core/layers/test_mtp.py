"""Multi-token prediction, one layer, in segments: what tests/test_cases.py does not compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.mtp import layer
from megatron_prefix.features.mtp.layer import WithoutLabels, without_labels
from megatron_prefix.features.mtp.part import MultiToken
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.megatron.install import installed
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import failures, hybrid, steps
from tests.harness.failures import Countdown, Fault
from tests.harness.mtp import assert_same, masked, model_of, run
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank
from tests.harness.steps import Contract, Microbatch


def step_of(model: Any) -> layer.StepAhead | None:
    """What the layer of a model that has run reads now."""
    hooks = installed(model)
    assert hooks is not None
    inside: layer.LooksAhead = hooks.kept[MultiToken]
    return inside.step


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def test_next_inputs_are_shared_and_no_more() -> None:
    """Where labels are masked, pairs alone would share further: see `masked`."""
    items = masked()
    expected = run(stock_schedule(), model_of(), Contract(), items)
    for fields in ({"chunk_tokens": 5, "segment_tokens": 16}, {"memory": "recompute"}, {}):
        schedule = schedule_with(**fields)
        assert_same(run(schedule, model_of(), Contract(), items), expected, items)
    forest = schedule.report.forest  # type: ignore[union-attr]
    assert executed_without(items) < forest.executed_tokens < forest.raw_tokens
    schedule = schedule_with()
    run(schedule, model_of(), Contract(), hybrid.items())
    forest = schedule.report.forest  # type: ignore[union-attr]
    assert forest.executed_tokens == executed_without(hybrid.items())


def executed_without(items: list[Microbatch]) -> int:
    """Positions that a step of a model without the layer computes."""
    schedule = schedule_with()
    model = model_of(spec={"mtp_num_layers": None})
    steps.call(schedule, Contract().step, model, items)
    assert schedule.report is not None
    return schedule.report.forest.executed_tokens


def without(name: str) -> Callable[..., Any]:
    """A forward step whose model call lacks an argument."""

    def step(data_iterator: Any, model: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            return model(*args, **{**named, name: None})

        return Contract().step(data_iterator, call)

    return step


def test_labels_count_where_a_trainer_looks_at_nothing() -> None:
    """Without a loss mask every label counts, also where the trainer says which positions its own
    loss looks at."""
    items = hybrid.items()
    step = without("loss_mask")
    expected = run(stock_schedule(), model_of(), Contract(), items, step=step)
    schedule = schedule_with()
    schedule.callbacks = Callbacks(lambda call: items[call.microbatch]["loss_mask"])
    found = run(schedule, model_of(), Contract(), items, step=step)
    assert_same(found, expected, items)
    assert schedule.report is not None
    read = sum(segment.num_read for segment in schedule.report.forest.segments)
    assert read < schedule.report.forest.executed_tokens


def test_a_layer_that_does_not_run_leaves_nothing() -> None:
    """In evaluation the layer's K/V are not even made."""
    peaks = []
    for spec in ({}, {"mtp_num_layers": None}):
        model = model_of(spec=spec)
        model.eval()
        schedule = schedule_with()
        run(schedule, model, Contract(), hybrid.items(), forward_only=True)
        assert schedule.report is not None
        peaks.append(schedule.report.cache_bytes)
    assert peaks[0] == peaks[1] > 0


def test_microbatches_without_any_loss() -> None:
    """Per token Megatron's log is not a number then, and its gradients are."""
    items = hybrid.items()
    for item in items[:3]:
        item["loss_mask"] = torch.zeros_like(item["loss_mask"])
    contract = Contract(per_token=True)
    expected = run(stock_schedule(), model_of(), contract, items)
    found = run(schedule_with(), model_of(), contract, items)
    assert expected.logged["values"].isnan().all() and found.logged["values"].isnan().all()
    expected.logged.clear(), found.logged.clear()
    assert_same(found, expected, items)
    with pytest.raises(CannotShare, match="no position for the loss of multi-token prediction"):
        run(schedule_with(), model_of(), Contract(), items)
    stock = run(stock_schedule(), model_of(), Contract(), items)
    assert all(one.isnan().any() for one in stock.gradients.values())


def test_where_the_trainer_has_no_loss_this_one_is_left() -> None:
    items = hybrid.items()
    for item in items:
        item["weight"] = torch.zeros_like(item["weight"])
    step = without("loss_mask")
    schedule = schedule_with()
    schedule.callbacks = Callbacks(lambda call: torch.zeros_like(call["input_ids"]))
    found = run(schedule, model_of(), Contract(), items, step=step)
    assert_same(found, run(stock_schedule(), model_of(), Contract(), items, step=step), items)


# --- failures -------------------------------------------------------------------------------------

PLACES = {
    "the layer": lambda model: (unwrap(model).mtp.layers[0].eh_proj, "forward"),
    "the loss": lambda model: (unwrap(model), "compute_language_model_loss"),
    "a later layer": lambda model: (unwrap(model).decoder.layers[0].mlp, "forward"),
}


def failing(patch: pytest.MonkeyPatch, model: Any, place: str, tick: Callable[[], None]) -> None:
    owner, name = PLACES[place](model)
    stock = getattr(owner, name)

    def method(*args: Any, **named: Any) -> Any:
        tick()
        return stock(*args, **named)

    patch.setattr(owner, name, method, raising=False)


FAULTS = [("the layer", 6), ("the loss", 5), ("a later layer", 1)]
"""Where, and at which of its calls."""


@pytest.mark.parametrize(("place", "after"), FAULTS)
def test_a_failure_leaves_nothing_behind(place: str, after: int) -> None:
    items, schedule, model = failures.items(), PrefixSchedule(failures.CONFIG), model_of()
    expected = run(schedule, model, Contract(), items)
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, model, place, Countdown(Fault, after))
        with pytest.raises(Fault):
            run(schedule, model, Contract(), items)
    hooks = installed(model)
    assert hooks is not None and step_of(model) is None and hooks.current is None
    assert "values" not in MTPLossLoggingHelper.tracker
    assert unwrap(model).config.mtp_num_layers == 1
    found = run(schedule, model, Contract(), items)
    assert all(map(torch.equal, found.gradients.values(), expected.gradients.values()))
    assert torch.equal(found.logged["values"], expected.logged["values"])


def test_a_step_that_is_made_again_logs_once() -> None:
    items, schedule, model = failures.items(), PrefixSchedule(failures.CONFIG), model_of()
    expected = run(schedule, model, Contract(), items)
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, model, "the layer", Countdown(torch.OutOfMemoryError, 6))
        found = run(schedule, model, Contract(), items)
    assert schedule.report is not None and schedule.report.retried
    assert_same(found, expected, items)


# --- refusals -------------------------------------------------------------------------------------


def refused(match: str, model: Any, contract: Contract | None = None, **options: Any) -> None:
    """Refused in mode "on"; in mode "auto" the stock schedule, or its own error."""
    items, contract = options.pop("items", None) or hybrid.items(), contract or Contract()
    with pytest.raises(CannotShare, match=match):
        run(schedule_with(), model, contract, items, **options)


def test_what_replaces_megatrons_methods() -> None:
    """As verl's and mbridge's patches do."""
    model = model_of()
    inner = unwrap(model)
    inner._postprocess = MethodType(type(inner)._postprocess, inner)
    refused("GPTModel's own _postprocess", model)
    for part, name in (
        (lambda inner: inner.mtp.layers[0], "MultiTokenPredictionLayer"),
        (lambda inner: inner.mtp, "MultiTokenPredictionBlock"),
    ):
        model = model_of()
        module = part(unwrap(model))
        module.forward = MethodType(type(module).forward, module)
        refused(f"multi-token prediction by {name}", model)


@pytest.mark.parametrize("method", ["_postprocess", "_get_embeddings"])
def test_what_replaces_them_in_the_class(monkeypatch, method: str) -> None:
    """As ROLL's strategy does, for every model of the process."""
    model = model_of()
    inner = unwrap(model)
    owner = type(inner if method == "_postprocess" else inner.mtp.layers[0])
    stock = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda self, *args, **named: stock(self, *args, **named))
    told = "GPTModel's own _postprocess" if owner is type(inner) else "by MultiTokenPredictionLayer"
    refused(told, model)


def test_what_a_known_trainer_puts_into_the_class(monkeypatch) -> None:
    """mcore_bridge's methods for attention follow Megatron's rule; that for the block does not."""

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        """As `_patch_mtp` there, which runs the layers more often."""

    forward.__module__ = "mcore_bridge.patcher"
    model = model_of()
    monkeypatch.setattr(type(unwrap(model).mtp), "forward", forward)
    refused("by MultiTokenPredictionBlock", model)


def test_what_replaces_them_between_two_steps() -> None:
    """And puts them back: the next step is shared."""
    model, items = model_of(), hybrid.items()
    expected = run(schedule_with(), model, Contract(), items)
    inner = unwrap(model)
    ours = inner._postprocess
    inner._postprocess = MethodType(type(inner)._postprocess, inner)
    refused("GPTModel's own _postprocess", model)
    inner._postprocess = ours
    assert_same(run(schedule_with(), model, Contract(), items), expected, items)


def test_a_config_with_the_option_and_a_model_without_the_layer() -> None:
    model = model_of(spec={"mtp_num_layers": None})
    unwrap(model).config.mtp_num_layers = 1
    refused("multi-token prediction by another stage than the last, or by none", model)


def test_fewer_layers_than_the_config_says() -> None:
    model = model_of()
    unwrap(model).config.mtp_num_layers = 2
    refused("multi-token prediction by more or fewer layers than mtp_num_layers says", model)


def test_options_of_the_config() -> None:
    for name, value in {"mtp_standalone": True, "mtp_isolated_loss": True}.items():
        model = model_of()
        setattr(unwrap(model).config, name, value)
        refused(name, model)


def test_calls_that_megatron_itself_cannot_run() -> None:
    if without_labels() is not WithoutLabels.FAILS:
        pytest.skip("it can: see tests/core/layers/test_mtp_newer.py")
    refused("no labels", model_of(), Contract(logits=True))
    with pytest.raises(AttributeError):
        run(stock_schedule(), model_of(), Contract(logits=True), hybrid.items())


def test_a_last_stage_without_tokens() -> None:
    from megatron_prefix.errors import refused as error
    from megatron_prefix.refusals.table import AHEAD_TOKENS

    rank: Any = SimpleNamespace(is_last=True)
    part = MultiToken(PrefixConfig(), rank, Callbacks())
    with pytest.raises(CannotShare) as caught:
        part.read_last(None, None)  # type: ignore[arg-type]
    assert str(caught.value) == str(error(AHEAD_TOKENS))
