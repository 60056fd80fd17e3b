"""Heads of trainers' own: what of them is refused, and what mode auto sees of it."""

from collections import deque

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.watch.around import WATCHED
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.run.calls import FILLED_BY_MODEL
from tests.harness.calls import run_step
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import small_model
from tests.harness.own_heads import HEADS, HeadForm, HeadTrainer, put_into

pytestmark = pytest.mark.usefixtures("on_one_rank")


class Quiet(HeadTrainer):
    """It keeps nothing of its steps, so that a schedule which watches them has nothing to say."""

    def __init__(self, head):
        super().__init__(HeadForm(head=head), 0, Layout())
        self.order = self.ended = deque(maxlen=0)

    def iterator(self):
        """See `Trainer.iterator`."""
        return iter(self.batches)


def job(head):
    """A trainer and its model."""
    model = small_model()
    put_into(model, head)
    return Quiet(head), model


def watching():
    """A schedule in mode auto, as trainers get it."""
    return schedule_with(looks_first=True, mode="auto", min_speedup=1e-3)


@pytest.mark.parametrize("head", HEADS)
def test_in_mode_auto_the_second_step_is_shared(head):
    schedule, reasons = watching(), []
    model = job(head)[1]
    for _ in range(2):
        run_step(schedule, Quiet(head), [model])
        reasons.append(schedule.report.decision.reason)
        assert schedule.report.decision.share == (len(reasons) == 2)
    assert reasons[0] == WATCHED


def per_call(model):
    """Lets the head put something of its own call into the call's dict."""
    inner = unwrap(model)
    whole = inner.forward

    def forward(*args, **given):
        output = whole(*args, **given)
        for name, weight in given[FILLED_BY_MODEL].items():  # where the head has run
            given[FILLED_BY_MODEL][name] = weight * 1.0
        return output

    inner.forward = forward


def test_what_is_one_call_s_is_stock_s_to_give():
    (trainer, model), (stock, other) = job("filled"), job("filled")
    for one in (model, other):
        per_call(one)
    with pytest.raises(
        CannotShare, match="puts more than weights into the output_processor_context"
    ):
        run_step(schedule_with(), trainer, [model])
    expected = run_step(stock_schedule(), stock, [other])
    schedule = watching()
    for _ in range(2):
        found = run_step(schedule, Quiet("filled"), [other])
        assert not schedule.report.decision.share
        for name, gradient in expected[1].items():
            assert torch.equal(found[1][name], gradient), name
    assert (
        "puts more than weights into the output_processor_context"
        in schedule.report.decision.reason
    )
