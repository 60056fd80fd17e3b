"""Model calls without gradients beside a forward step's own: a reference with adapters off."""

import contextlib

import pytest
import torch

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.refusals import table
from tests.harness import lora, steps
from tests.harness.one_group import items
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import assert_bitwise

SMALL = {"segment_tokens": 8, "chunk_tokens": 8}
"""More than one wave, so that segments run between forward steps that go on."""


class Switched(lora.Adapted):
    """An adapter that can be off; the switch is the class's until it is used, as peft's is."""

    enabled = True

    def forward(self, x, *args, **kwargs):
        if self.enabled:
            return super().forward(x, *args, **kwargs)
        output, bias = self.to_wrap(x, *args, **kwargs)
        return output, bias


@contextlib.contextmanager
def adapters_off(model):
    adapters = [one for one in model.modules() if isinstance(one, Switched)]
    for one in adapters:
        one.enabled = False
    yield
    for one in adapters:
        one.enabled = True


def adapted(model):
    lora.adapt(model)
    for module in model.modules():
        if isinstance(module, lora.Adapted):
            module.__class__ = Switched
    return model


def call(model, batch, **given):
    given = {"labels": batch["labels"], "loss_mask": batch["loss_mask"], **given}
    return model(batch["tokens"], batch["position_ids"], None, **given)


def preferring(batch, reference):
    """A loss on whole samples against a reference's: [samples, positions] each."""

    def loss(output):
        rewards = ((reference - output) * batch["loss_mask"] * batch["weight"]).sum(1)
        found = -torch.nn.functional.logsigmoid(rewards).sum()
        logs = {"uid": batch["uid"], "loss": found.detach().clone()}
        return found, batch["loss_mask"].sum().to(torch.int32), logs

    return loss


def reference_first(iterator, model):
    batch = next(iterator)
    with torch.no_grad(), adapters_off(model):
        reference = call(unwrap(model), batch)  # as ms-swift does, without its wrappers
    return call(model, batch), preferring(batch, reference)


def reference_last(iterator, model):
    batch = next(iterator)
    output = call(model, batch)
    with torch.no_grad(), adapters_off(model):
        reference = call(model, batch)
    return output, preferring(batch, reference)


def reference_of_logits(iterator, model):
    batch = next(iterator)
    with torch.no_grad(), adapters_off(model):
        logits = call(model, batch, labels=None)
    picked = logits.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    return call(model, batch), preferring(batch, -picked)


def adapters_off_around_the_call(iterator, model):
    batch = next(iterator)
    with adapters_off(model):
        output = call(model, batch)
    return output, preferring(batch, torch.zeros_like(output))


def twice_with_gradients(iterator, model):
    batch = next(iterator)
    return call(model, batch) + call(model, batch), preferring(batch, torch.zeros(()))


def schedule(mode="auto"):
    config = PrefixConfig(  # nobody adds up gradients of ranks here, so each computes its own
        min_gain=0, kernel="math", mode=mode, min_speedup=0.01, across_ranks="off", **SMALL
    )
    return PrefixSchedule(config, looks_first=True)


def two_steps(runs, step, model):
    return [steps.run(runs, step, model, items()) for _ in range(2)]


def assert_alike(found, wanted):
    tokens = sum(one["tokens"].numel() for one in items())
    for (logs, gradients), (expected, reference) in zip(found, wanted, strict=True):
        steps.assert_gradients(gradients, reference, tokens)
        for mine, its in zip(logs, expected, strict=True):
            assert mine["uid"] == its["uid"]
            torch.testing.assert_close(mine["loss"], its["loss"], rtol=1e-12, atol=1e-12)


@pytest.fixture
def one():
    with one_rank():
        yield


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("step", [reference_first, reference_last], ids=lambda step: step.__name__)
def test_the_model_itself_answers_a_call_without_gradients(one, step, mode):
    ours = schedule(mode)
    found = two_steps(ours, step, adapted(small_model(wrap_ddp=False)))
    assert_alike(found, two_steps(stock_schedule(), step, adapted(small_model(wrap_ddp=False))))
    assert ours.report is not None and ours.report.decision.share
    assert len(ours.report.forest.segments) > 3


KEPT = {
    reference_of_logits: table.BESIDE_LOGITS,
    adapters_off_around_the_call: table.SWITCHED,
    twice_with_gradients: table.TWO_CALLS,
}


@pytest.mark.parametrize("step", KEPT, ids=lambda step: step.__name__)
def test_other_steps_stay_with_the_stock_schedule(one, step):
    ours = schedule()
    found = two_steps(ours, step, adapted(small_model(wrap_ddp=False)))
    wanted = two_steps(stock_schedule(), step, adapted(small_model(wrap_ddp=False)))
    for mine, its in zip(found, wanted, strict=True):
        assert_bitwise(mine, its, may_vanish=True)
    assert ours.report is not None and ours.report.decision.reason.endswith(KEPT[step].fix)
    with pytest.raises(UserError) as caught:
        two_steps(schedule("on"), step, adapted(small_model(wrap_ddp=False)))
    assert caught.value.refusal is KEPT[step]
