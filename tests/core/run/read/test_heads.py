"""Heads of trainers' own: what of them is refused, and what mode auto sees of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.watch.around import WATCHED
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.refusals import table
from megatron_prefix.run.calls import FILLED_BY_MODEL, ModelCall
from megatron_prefix.run.read import heads
from tests.harness.calls import run_step
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.own_heads import HEADS, HeadForm, HeadTrainer, put_into


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


class Quiet(HeadTrainer):
    """It keeps nothing of its steps, so that a schedule which watches them has nothing to say."""

    def __init__(self, head: str) -> None:
        super().__init__(HeadForm(head=head), 0, Layout())
        self.order = self.ended = deque(maxlen=0)  # type: ignore[assignment]

    def iterator(self) -> Any:
        """See `Trainer.iterator`."""
        return iter(self.batches)


def job(head: str) -> tuple[HeadTrainer, Any]:
    """A trainer and its model."""
    model = small_model()
    put_into(model, head)
    return Quiet(head), model


def watching() -> Any:
    """A schedule in mode auto, as trainers get it."""
    return schedule_with(looks_first=True, mode="auto", min_speedup=1e-3)


@pytest.mark.parametrize("head", HEADS)
def test_in_mode_auto_the_second_step_is_shared(head: str) -> None:
    schedule, reasons = watching(), []
    model = job(head)[1]
    for _ in range(2):
        run_step(schedule, Quiet(head), [model])
        reasons.append(schedule.report.decision.reason)
        assert schedule.report.decision.share == (len(reasons) == 2)
    assert reasons[0] == WATCHED


def test_a_head_beside_further_tokens_is_stock_s_to_run() -> None:
    schedule, model = watching(), small_model(spec={"mtp_num_layers": 1})
    put_into(model, "kernels")
    for _ in range(2):
        run_step(schedule, Quiet("kernels"), [model])
        assert not schedule.report.decision.share
    assert "multi-token prediction, and a head" in schedule.report.decision.reason


def per_call(model: Any) -> None:
    """Lets the head put something of its own call into the call's dict."""
    inner = unwrap(model)
    whole = inner.forward

    def forward(*args: Any, **given: Any) -> Any:
        output = whole(*args, **given)
        for name, weight in given[FILLED_BY_MODEL].items():  # where the head has run
            given[FILLED_BY_MODEL][name] = weight * 1.0
        return output

    inner.forward = forward


def test_what_is_one_call_s_is_stock_s_to_give() -> None:
    (trainer, model), (stock, other) = job("filled"), job("filled")
    for one in (model, other):
        per_call(one)
    with pytest.raises(CannotShare, match="more into the output_processor_context"):
        run_step(schedule_with(), trainer, [model])
    expected = run_step(stock_schedule(), stock, [other])
    schedule = watching()
    for _ in range(2):
        found = run_step(schedule, Quiet("filled"), [other])
        assert not schedule.report.decision.share
        for name, gradient in expected[1].items():
            assert torch.equal(found[1][name], gradient), name
    assert "more into the output_processor_context" in schedule.report.decision.reason


@pytest.mark.parametrize("value", [7, 0.25, "a word", torch.ones(2), (1, 2)])
def test_a_segment_s_dict_is_the_call_s_and_takes_weights_only(value: Any) -> None:
    weight, old = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    filled = heads.FilledDict({"scale": 0.5, "weight": old})  # an answer in an attempt before
    for _ in range(2):
        context = dict(filled.brought)
        assert context == {"scale": 0.5}
        context["weight"] = weight
        filled.take({FILLED_BY_MODEL: context}, scored=True)
    call = ModelCall(0, {FILLED_BY_MODEL: {"scale": 0.5}})
    filled.give(call)
    assert call[FILLED_BY_MODEL] == {"scale": 0.5, "weight": weight}
    for name in ("scale", "more"):
        one = heads.FilledDict({"scale": 0.5})
        with pytest.raises(CannotShare, match="more into the output_processor_context"):
            one.take({FILLED_BY_MODEL: {"scale": 1, name: value}}, scored=True)


@pytest.mark.parametrize(
    "given", [{heads.MOVES_LABELS: True}, {FILLED_BY_MODEL: {}}, {heads.OWN_HEAD: print}]
)
def test_heads_for_further_tokens_are_refused(given: dict[str, Any]) -> None:
    calls = [ModelCall(0, given)]
    heads.check([ModelCall(0, {heads.MOVES_LABELS: False})])
    with pytest.raises(CannotShare, match="multi-token prediction") as found:
        heads.check(calls)
    assert found.value.refusal is table.AHEAD_HEAD


@pytest.mark.parametrize("more", [1, 2])
def test_labels_come_out_right_once_they_are_moved(more: int) -> None:
    labels = torch.arange(5, 9)[None]
    moved = heads.before_moving(labels, more)
    assert moved.shape[1] == labels.shape[1] + more
    assert torch.equal(heads.without_more(moved.roll(-1, -1)[:, :-1], 4), labels)
