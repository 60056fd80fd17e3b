"""Multi-token prediction, one layer, in segments: against Megatron's own schedule in fp64."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
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
from megatron_prefix.tree import Pairs
from tests.harness import failures, hybrid, mtp, steps
from tests.harness.failures import Countdown, Fault
from tests.harness.mtp import (
    CONTRACTS,
    ITEMS,
    MODELS,
    SCHEDULES,
    assert_same,
    compared,
    model_of,
    run,
)  # fmt: skip
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank
from tests.harness.rows import EVERYTHING, rows
from tests.harness.steps import Contract, Microbatch

pytestmark = pytest.mark.turns


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


# All schedules run on a tree; elsewhere it is about what this loss reads.
SOME = ("packs of chunks", "recompute")
KINDS = [("tree", tuple(SCHEDULES)), *((kind, SOME) for kind in ITEMS if kind != "tree")]
MORE = [(kind, tuple(one for one in SCHEDULES if one not in SOME)) for kind, _ in KINDS[1:]]


@pytest.mark.parametrize(("kind", "schedules"), rows([*KINDS, *MORE], MORE))
def test_steps_are_the_stock_schedules(kind: str, schedules: tuple[str, ...]) -> None:
    for schedule in compared("dense", Contract(), kind, *schedules):
        assert schedule.report is not None and schedule.report.memory is not None
        if not schedule.config.cache_host_layers:
            assert schedule.report.memory.cache_peak == schedule.report.cache_bytes
        forest = schedule.report.forest
        assert schedule.config.min_gain or forest.executed_tokens < forest.raw_tokens


@pytest.mark.parametrize("contract", rows(CONTRACTS, ["triple"]))  # which is that of all others
def test_contracts_of_the_loss(contract: str) -> None:
    list(compared("dense", CONTRACTS[contract], "weighed", "packs of chunks", "recompute"))


@pytest.mark.parametrize("kind", rows(["tree", "prefixes"], ["prefixes"]))  # dense: both, above
@pytest.mark.parametrize("model", [name for name in MODELS if name != "dense"])
def test_models(model: str, kind: str) -> None:
    more = ("recompute", "offload") if EVERYTHING in os.environ else ()  # as of any model
    list(compared(model, Contract(), kind, "packs of chunks", *more))


def test_losses_of_experts_in_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running mean over microbatches, and a mean that weighs tokens."""
    over = dict(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.02)
    monkeypatch.setitem(
        MODELS,
        "one mean",
        dict(name="tiny-moe", config_overrides={**over, "moe_router_dtype": "fp64"}),
    )
    for contract in ("triple", "per token"):
        list(compared("one mean", CONTRACTS[contract], "tree", "trees packed", "depth first"))


def test_next_inputs_are_shared_and_no_more() -> None:
    """Where labels are masked, pairs alone would share further: see `masked`."""
    [schedule] = compared("dense", Contract(), "masked", "trees packed")
    forest = schedule.report.forest  # type: ignore[union-attr]
    [plain] = compared_without(ITEMS["masked"]())
    assert plain.executed_tokens < forest.executed_tokens < forest.raw_tokens
    [schedule] = compared("dense", Contract(), "tree", "trees packed")
    [plain] = compared_without(hybrid.items())
    assert schedule.report.forest.executed_tokens == plain.executed_tokens  # type: ignore[union-attr]


def compared_without(items: list[Microbatch]) -> Iterator[Any]:
    """The forest of a step of a model without the layer."""
    schedule = schedule_with()
    model = model_of(spec={"mtp_num_layers": None})
    steps.call(schedule, Contract().step, model, items)
    assert schedule.report is not None
    yield schedule.report.forest


@pytest.mark.parametrize("kind", ["learned_absolute", "none"])
def test_other_positions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learned position is that of the next input, and 0 at the end."""
    from megatron.core.models.gpt import gpt_model

    class Model(gpt_model.GPTModel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "position_embedding_type": kind})

    monkeypatch.setattr(gpt_model, "GPTModel", Model)
    monkeypatch.setitem(MODELS, kind, dict(name="tiny-moe", spec=dict(max_position=64)))
    list(compared(kind, Contract(), "prefixes", "packs of chunks"))


def without(name: str) -> Callable[..., Any]:
    """A forward step whose model call lacks an argument."""

    def step(data_iterator: Any, model: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            return model(*args, **{**named, name: None})

        return Contract().step(data_iterator, call)

    return step


def test_without_a_loss_mask_every_label_counts() -> None:
    """Also where the trainer says which positions its own loss looks at."""
    items = hybrid.items()
    step = without("loss_mask")
    expected = run(stock_schedule(), model_of(), Contract(), items, step=step)
    schedule = schedule_with()
    assert_same(run(schedule, model_of(), Contract(), items, step=step), expected, items)
    schedule.callbacks = Callbacks(lambda call: items[call.microbatch]["loss_mask"])
    found = run(schedule, model_of(), Contract(), items, step=step)
    assert_same(found, expected, items)
    assert schedule.report is not None
    read = sum(segment.num_read for segment in schedule.report.forest.segments)
    assert read < schedule.report.forest.executed_tokens


@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_it_logs_in_training_with_gradients_or_without(training: bool, forward_only: bool) -> None:
    items = mtp.weighed()
    models = [model_of(), model_of()]
    for model in models:
        model.train(training)
    schedules = stock_schedule(), schedule_with(chunk_tokens=7)
    expected, found = (
        run(one, model, Contract(), items, forward_only=forward_only)
        for one, model in zip(schedules, models, strict=True)
    )
    assert_same(found, expected, items)
    assert bool(found.logged) == training
    hooks = installed(models[1])
    assert hooks is not None and step_of(models[1]) is None


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


def test_a_label_moves_into_loss_where_the_position_has_none() -> None:
    """A prompt's last position has none of its own loss, and one of the label after it."""
    tokens = np.random.default_rng(2).integers(0, 60, (3, 9))
    tokens[:, :6] = tokens[0, :6]
    flags = np.arange(8) >= 7
    items = [
        steps.microbatch([Pairs(one[:-1], one[1:], flags)], 0, uid)
        for uid, one in enumerate(tokens)
    ]
    expected = run(stock_schedule(), model_of(), Contract(), items)
    for fields in ({}, {"chunk_tokens": 2, "segment_tokens": 2}):
        assert_same(run(schedule_with(**fields), model_of(), Contract(), items), expected, items)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_first_steps_are_watched(mode: str) -> None:
    items, model = hybrid.items(), model_of()
    expected = run(stock_schedule(), model_of(), Contract(), items)
    schedule = schedule_with(looks_first=True, mode=mode, min_speedup=0.1)
    for number in range(2):
        assert_same(run(schedule, model, Contract(), items), expected, items)
        assert schedule.report is not None
        assert schedule.report.decision.share == (mode == "on" or number == 1)


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


FAULTS = [("the layer", 1), ("the loss", 5), ("a later layer", 1)]
"""Where, and at which of its calls; every place with the other call is a product."""
OTHERS = [(place, 6 - after) for place, after in FAULTS]


@pytest.mark.parametrize(("place", "after"), rows(FAULTS + OTHERS, OTHERS))
def test_a_failure_leaves_nothing_behind(place: str, after: int) -> None:
    items, schedule, model = failures.items(), PrefixSchedule(failures.CONFIG), model_of()
    expected = run(schedule, model, Contract(), items)
    for _ in range(2):
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


def test_more_than_one_layer() -> None:
    model = model_of(spec={"mtp_num_layers": 2})
    refused("mtp_num_layers above 1", model)
    schedule = PrefixSchedule(PrefixConfig(mode="auto", min_gain=0, kernel="math"))
    found = run(schedule, model, Contract(), hybrid.items())
    assert schedule.report is not None and not schedule.report.decision.share
    assert found.logged["values"].shape == (2,)


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


def test_options_of_the_config() -> None:
    for name, value in {"mtp_standalone": True, "mtp_isolated_loss": True}.items():
        model = model_of()
        setattr(unwrap(model).config, name, value)
        refused(name, model)


def test_calls_that_megatron_itself_cannot_run() -> None:
    if without_labels() is not WithoutLabels.FAILS:
        pytest.skip("it can: see tests/harness/mtp.py")
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
