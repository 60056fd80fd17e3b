"""What the trainer's losses get of joined outputs, when, and what they may send back."""

import contextlib
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.run.execute import call_outputs
from megatron_prefix.run.execute.call_outputs import CallOutputs
from megatron_prefix.run.execute.losses import are_in_order
from megatron_prefix.run.read.step import Step
from megatron_prefix.tree import Pairs
from tests.harness import steps
from tests.harness.arenas import Storages
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")
CONFIG = PrefixConfig(min_gain=0, kernel="math")


class Watched(steps.Contract):
    """A trainer that remembers which microbatches and outputs its losses get, in their order."""

    def __init__(self, **fields):
        super().__init__(**fields)
        vars(self)["seen"] = []

    def loss_func(self, batch):
        loss = super().loss_func(batch)

        def loss_func(output):
            self.seen.append((batch["uid"], output.detach().clone()))
            return loss(output)

        return loss_func


def rollouts(*rows, trained=0):
    """Microbatches of one rollout each, of these tokens, trained from a position on."""
    pairs = [Pairs(row, row, np.arange(len(row)) >= trained) for row in map(np.array, rows)]
    return [steps.microbatch([one], 0, uid) for uid, one in enumerate(pairs)]


def whole(model, item, logits=False):
    """The model's output for a microbatch."""
    labels = None if logits else item["labels"]
    with torch.no_grad():
        return model(item["tokens"], item["position_ids"], None, labels=labels)


@pytest.mark.parametrize("logits", [False, True])
def test_the_trainer_sees_its_microbatch_with_zeros_before_loss(logits):
    items = rollouts(*([*range(9), *[20 + n] * 3] for n in range(2)), trained=9)
    model, trainer = small_model(), Watched(logits=logits)
    expected = [whole(model, item, logits)[:, 9:] for item in items]
    steps.call(PrefixSchedule(CONFIG), trainer.step, model, items)
    assert [uid for uid, _ in trainer.seen] == [0, 1]
    for (_, output), wanted in zip(trainer.seen, expected, strict=True):
        assert output.shape[:2] == (1, 12) and not output[:, :9].any()
        assert_close(output[:, 9:], wanted, 100)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("segment_tokens", "called"), [(2, [0, 2, 1]), (0, [0, 1, 2])])
def test_results_are_in_the_trainers_order(segment_tokens, called, forward_only, monkeypatch):
    """Whatever that of segments is: the first and the third rollout are equal, and two positions a
    segment or all in one. Without gradients losses keep it, too: who collects results call by call
    would get them permuted. No segment's output is kept when no loss needs it."""
    taken, stock = [], CallOutputs.take
    monkeypatch.setattr(
        CallOutputs, "take", lambda *args, **named: taken.append(args[0]) or stock(*args, **named)
    )
    config = PrefixConfig(min_gain=0, kernel="math", segment_tokens=segment_tokens)
    items, model, trainer = rollouts([1, 1], [2, 2], [1, 1]), small_model(), Watched()
    expected = [whole(model, item) for item in items]
    schedule = PrefixSchedule(config)
    logs = steps.call(schedule, trainer.step, model, items, forward_only=forward_only)
    report, in_order = schedule.report, [0, 1, 2]
    assert len(report.forest.segments) == (2 if segment_tokens else 1)
    assert [log["uid"] for log in logs] == in_order
    assert [uid for uid, _ in trainer.seen] == (in_order if forward_only else called)
    step = Step(report.forest, (0, 1, 2), (False,) * 3, [])
    if not forward_only:
        assert are_in_order(step, report.plan.actions_of(0, 0)) == (called == in_order)
    for uid, output in trainer.seen:
        assert_close(output, expected[uid], 10)
    assert taken and not any(one.kept for one in taken)


@pytest.mark.parametrize(("value", "message"), [
    (torch.zeros(()), r"returns a tensor of shape .* positions"),
    (torch.zeros(3, 7), r"returns a tensor of shape .* positions"),
    (SimpleNamespace(nll=torch.zeros(1, 10)), "returns a SimpleNamespace, in which"),
])  # fmt: skip
def test_an_output_that_is_not_per_position_is_refused(value, message):
    model, items = small_model(), rollouts([*range(9), 20], [*range(9), 21])
    inner = unwrap(model)
    stock = inner.forward
    inner.forward = functools.wraps(stock)(lambda *args, **named: (stock(*args, **named), value))
    with pytest.raises(UserError, match=message):
        steps.call(PrefixSchedule(CONFIG), steps.Contract().step, model, items)


def test_logits_of_one_microbatch_at_a_time():
    """The next one begins when nothing holds the one before, nor what its loss has saved."""
    alive, before = [], Storages()

    class Saving(steps.Contract):
        def loss_func(self, batch):
            stock = super().loss_func(batch)

            def loss_func(output):
                alive.append(before.num_alive)
                saved = output.tanh()
                before.add(output)
                before.add(saved)
                return stock(saved * saved)

            return loss_func

    items, contract = rollouts(*([1, 2, 3, n] for n in range(4))), Saving(logits=True)
    schedule = PrefixSchedule(CONFIG)
    found = steps.run(schedule, contract.step, small_model(), items)
    assert [len(segment.spans) for segment in schedule.report.forest.segments] == [1, 4]
    assert alive == [0] * 4 and len(before.seen) == 8
    expected = steps.plain(small_model(wrap_ddp=False), contract, items)
    steps.assert_gradients(found.gradients, expected, 16)


MASKED = 40
"""Positions of a prompt without loss; in its answers the sixth has none, either."""


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("read", [0, 16, MASKED - 1, MASKED + 5, MASKED, None])
def test_a_gradient_of_a_masked_position_is_an_error(logits, read, monkeypatch):
    """However small; those of logits are looked at `CHECKED_ROWS` at a time. The loss of the second
    of two rollouts looks at one position more."""
    monkeypatch.setattr(call_outputs, "CHECKED_ROWS", 16)
    items = rollouts(*([*range(MASKED), *[50 + n] * 10] for n in range(2)), trained=MASKED)
    for item in items:
        item["loss_mask"][:, MASKED + 5] = 0.0
    contract = steps.Contract(logits=logits)

    def step(iterator, model):
        batch = next(iterator)
        output, stock = contract.step(iter([batch]), model)

        def loss_func(output):
            loss, *others = stock(output)
            extra = 0 if read is None or batch["uid"] == 0 else 1e-9 * output[0, read].sum()
            return loss + extra, *others

        return output, loss_func

    wrong = pytest.raises(UserError, match="positions without loss, which were not computed")
    with contextlib.nullcontext() if read in (MASKED, None) else wrong:
        steps.call(PrefixSchedule(CONFIG), step, small_model(), items)
