"""Multi-token prediction, one layer, in segments: what tests/test_cases.py does not compare."""

from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from torch import Tensor

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.mtp.methods import WithoutLabels, without_labels
from megatron_prefix.features.mtp.part import MultiToken
from megatron_prefix.features.mtp.patches import moves_by_padded_ends
from megatron_prefix.lab import numerics
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.megatron.install import installed
from megatron_prefix.megatron.logged_losses import logged_losses
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.schedule import PrefixSchedule
from tests import judge
from tests.cases import row
from tests.harness import failures, hybrid, steps
from tests.harness.failures import Countdown, Fault
from tests.harness.mtp_keyword import keyword
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract
from tests.oracle import judge as oracle

FACTOR = 3.0
"""Of the loss: what is wrong in it must not vanish beside the model's own."""


def model_of(**options):
    """A small model with the layer; equal arguments give equal weights."""
    over = {"mtp_loss_scaling_factor": FACTOR, **options.pop("config_overrides", {})}
    spec = {"mtp_num_layers": 1, **options.pop("spec", {})}
    return small_model(spec=spec, config_overrides=over, **options)


def masked():
    """Labels are zero where they carry no loss, and prompts that begin alike go on differently."""
    found, draw = hybrid.items(), np.random.default_rng(7)
    for item in found[:2]:  # the pair (input, label) is the others', the next input is not
        item["tokens"][:, 11:29] = torch.from_numpy(draw.integers(0, 60, 18))
    for item in found:
        item["labels"] = item["labels"] * (item["loss_mask"] != 0)
    return found


class Found(NamedTuple):
    """What a step gave: logs of losses, gradients, Megatron's log of this loss and of the routers'
    losses, and their biases."""

    logs: list[Any]
    gradients: dict[str, Tensor]
    logged: dict[str, Tensor]


def run(schedule, model, contract, items):
    """A step of a trainer; biases of experts are put back afterwards."""
    tracker, inner = MTPLossLoggingHelper.tracker, unwrap(model)
    tracker.clear()
    forget_logged_losses()
    MTPLossAutoScaler.set_loss_scale(torch.tensor(17.0))  # of another step
    before = [buffer.clone() for buffer in inner.buffers()]
    contract.configure(model)
    logs, gradients = steps.run(schedule, contract.step, model, items)
    logged = {name: value.clone() for name, value in tracker.items() if "values" in name}
    logged |= logged_losses()
    logged |= {name: one.clone() for name, one in inner.named_buffers() if "bias" in name}
    for buffer, value in zip(inner.buffers(), before, strict=True):
        buffer.copy_(value)
    return Found(logs, gradients, logged)


def assert_same(found, expected, items):
    """By the numerics policy; Megatron keeps its log in float32."""
    num = sum(item["tokens"].numel() for item in items)
    steps.assert_gradients(found.gradients, expected.gradients, num)
    limit = numerics.tolerance(torch.float64, num)
    for ours, theirs in zip(found.logs, expected.logs, strict=True):
        if isinstance(theirs, dict):
            assert abs(ours["loss"] - theirs["loss"]) <= limit * (1 + abs(theirs["sum"]))
    assert found.logged.keys() == expected.logged.keys()
    limit = numerics.tolerance(torch.float32, len(items))
    for name, theirs in expected.logged.items():
        torch.testing.assert_close(found.logged[name], theirs, rtol=limit, atol=0.0)


pytestmark = pytest.mark.usefixtures("on_one_rank")


def test_next_inputs_are_shared_and_no_more():
    """Where labels are masked, pairs alone would share further: see `masked`."""
    items = masked()
    expected = run(stock_schedule(), model_of(), Contract(), items)
    for fields in ({"chunk_tokens": 5, "segment_tokens": 16}, {"memory": "recompute"}, {}):
        schedule = schedule_with(**fields)
        assert_same(run(schedule, model_of(), Contract(), items), expected, items)
    forest = schedule.report.forest
    assert executed_without(items) < forest.executed_tokens < forest.raw_tokens
    schedule = schedule_with()
    run(schedule, model_of(), Contract(), hybrid.items())
    forest = schedule.report.forest
    assert forest.executed_tokens == executed_without(hybrid.items())


def executed_without(items):
    """Positions that a step of a model without the layer computes."""
    schedule = schedule_with()
    model = model_of(spec={"mtp_num_layers": None})
    steps.call(schedule, Contract().step, model, items)
    return schedule.report.forest.executed_tokens


def test_microbatches_without_any_loss():
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


PLACES = {
    "the layer": (6, lambda model: (unwrap(model).mtp.layers[0].eh_proj, "forward")),
    "the loss": (5, lambda model: (unwrap(model), "compute_language_model_loss")),
    "a later layer": (1, lambda model: (unwrap(model).decoder.layers[0].mlp, "forward")),
}
"""At which call, and of what."""


def failing(patch, model, place, error):
    after, found = PLACES[place]
    (owner, name), tick = found(model), Countdown(error, after)
    stock = getattr(owner, name)

    def method(*args, **named):
        tick()
        return stock(*args, **named)

    patch.setattr(owner, name, method, raising=False)


@pytest.mark.parametrize("place", PLACES)
def test_a_failure_leaves_nothing_behind(place):
    items, schedule, model = failures.items(), PrefixSchedule(failures.CONFIG), model_of()
    expected = run(schedule, model, Contract(), items)
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, model, place, Fault)
        with pytest.raises(Fault):
            run(schedule, model, Contract(), items)
    hooks = installed(model)
    assert hooks is not None and hooks.kept[MultiToken].step is None and hooks.current is None
    assert "values" not in MTPLossLoggingHelper.tracker
    assert unwrap(model).config.mtp_num_layers == 1
    found = run(schedule, model, Contract(), items)
    assert all(map(torch.equal, found.gradients.values(), expected.gradients.values()))
    assert torch.equal(found.logged["values"], expected.logged["values"])
    with pytest.MonkeyPatch.context() as patch:  # a step that is made again logs once
        failing(patch, model, place, torch.OutOfMemoryError)
        found = run(schedule, model, Contract(), items)
    assert schedule.report is not None and schedule.report.retried
    assert_same(found, expected, items)


def refused(match, model, contract=None):
    """Refused in mode "on"; in mode "auto" the stock schedule, or its own error."""
    with pytest.raises(CannotShare, match=match):
        run(schedule_with(), model, contract or Contract(), hybrid.items())


def test_a_trainer_that_puts_back_what_an_earlier_step_had_there():
    """As verl does when it takes its patch out: what it has kept is a method of ours."""
    items, schedule, model = hybrid.items(), schedule_with(), model_of()
    inner, contract = unwrap(model), Contract()
    expected = run(schedule, model, contract, items)

    def method(self, **named):
        return type(self)._postprocess(self, **named)

    method.__module__ = "verl.models.mcore.mtp_patch"
    kept, inner._postprocess = inner._postprocess, MethodType(method, inner)
    run(schedule, model, contract, items)
    inner._postprocess = kept
    found = run(schedule, model, contract, items)
    assert all(map(torch.equal, found.gradients.values(), expected.gradients.values()))
    assert torch.equal(found.logged["values"], expected.logged["values"])


class WithTokens(Contract):
    """Calls the model as slime and miles do."""

    def __init__(self, more=(), **change):
        super().__init__(logits=True)
        vars(self).update(change=change, more=dict(more))

    def step(self, data_iterator, model):
        def call(tokens, *args, **named):
            given = {"mtp_kwargs": {"mtp_labels": tokens} | self.more, **self.change}
            return model(tokens, *args, **{**named, **given})

        return super().step(data_iterator, call)


def test_patches_of_slime_and_miles_that_do_otherwise():
    """Older ones train the output layer, too."""
    for change in ({"trains_head": True}, {"moves_mask": False}):
        with keyword(**change):
            refused("GPTModel's own _postprocess", model_of(), WithTokens())


@pytest.mark.parametrize("change", [
    {"mtp_kwargs": {"mtp_labels": torch.zeros(1, 1)}}, {"mtp_kwargs": ["mtp_labels"]},
    {"more": {"mtp_depth": 2}}, {"loss_mask": None},
    {"mtp_kwargs": None, "extra_block_kwargs": {"mtp_kwargs": {}}},
], ids=["other tokens", "no dict", "another key", "no mask", "for the decoder"])  # fmt: skip
def test_keywords_that_say_more_than_tokens(change):
    with keyword():
        refused("model calls with mtp_kwargs", model_of(), WithTokens(**change))


def test_what_replaces_megatrons_methods():
    """As verl's and mbridge's patches do."""
    model = model_of()
    inner = unwrap(model)
    inner._postprocess = MethodType(type(inner)._postprocess, inner)
    refused("GPTModel's own _postprocess", model)
    for name in ("MultiTokenPredictionLayer", "MultiTokenPredictionBlock"):
        model = model_of()
        module = next(part for part in model.modules() if type(part).__name__ == name)
        module.forward = MethodType(type(module).forward, module)
        refused(f"multi-token prediction by {name}", model)
    model = model_of()
    unwrap(model).mtp.layers[0].mhc_enabled = True
    refused("multi-token prediction by a layer with several residual streams", model)
    model = model_of(spec={"mtp_num_layers": None})  # and its config has the option
    unwrap(model).config.mtp_num_layers = 1
    refused("multi-token prediction by another stage than the last, or by none", model)


def test_calls_that_megatron_itself_cannot_run():
    if without_labels() is not WithoutLabels.FAILS:
        pytest.skip("it can: see tests/core/layers/test_mtp_newer.py")
    refused("no labels", model_of(), Contract(logits=True))
    with pytest.raises(AttributeError):
        run(stock_schedule(), model_of(), Contract(logits=True), hybrid.items())


def test_stock_is_wrong_in_packs_whose_ends_leave_padding_out():
    """Why they are refused; rows have both. Its labels are those of other samples, and weights of
    the layer, which get a gradient of its own loss alone, are off by a third. Megatron-Bridge's
    models for images hand it the other ends."""
    space = {"_get_mtp_packed_seq_params": None}  # in whose place the second class is, too
    exec("class Own:\n def forward(self): _get_mtp_packed_seq_params(self)", space)
    exec("class Hybrid:\n def forward(self): ...", space)
    others = space["Hybrid"](), model_of()
    assert moves_by_padded_ends(space["Own"]()) and not any(map(moves_by_padded_ends, others))
    right, wrong = (
        oracle.run(judge.case_of(row("mtp", form=form)), "stock")[0].gradients
        for form in ("thd_ends", "thd_padded")
    )
    own = {name: one for name, one in right.items() if name.startswith("mtp.")}
    assert max((wrong[name] - one).norm() / one.norm() for name, one in own.items()) > 0.3
