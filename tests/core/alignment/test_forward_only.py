"""Calls with forward_only in which gradients are enabled: Megatron's schedule disables none."""

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix.errors import CannotShare
from megatron_prefix.refusals.table import FORWARD_GRAPH
from tests.harness import steps
from tests.harness.one_group import items, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank():
        yield


def auto():
    return schedule_with(looks_first=True, mode="auto", min_speedup=0.01)


class Attached(Contract):
    """A trainer that keeps losses with their graph, and notes whether gradients are enabled."""

    def loss_func(self, batch):
        stock = super().loss_func(batch)

        def loss_func(output, non_loss_data=False):
            loss, num_tokens, logs = stock(output, non_loss_data)
            return loss, num_tokens, logs | {"graph": loss, "enabled": torch.is_grad_enabled()}

        return loss_func


def results(schedule, model):
    return steps.call(schedule, Attached().step, model, items(), forward_only=True)


def test_results_that_keep_their_graph_are_the_stock_schedules():
    schedule, model, twin = auto(), small_model(wrap_ddp=False), small_model(wrap_ddp=False)
    for one, chunk in ((schedule, model), (stock_schedule(), twin)):
        for _ in range(2):
            chunk.zero_grad(set_to_none=True)
            torch.stack([log["graph"] for log in results(one, chunk)]).sum().backward()
    assert schedule.report.decision.reason.startswith(FORWARD_GRAPH.name)
    expected = steps.gradients(twin)
    assert all(torch.equal(one, expected[name]) for name, one in steps.gradients(model).items())


def test_their_backward_is_refused_where_they_are_shared():
    model = small_model(wrap_ddp=False)
    logs = results(schedule_with(), model)
    assert all(log["enabled"] and log["graph"].requires_grad for log in logs)
    with pytest.raises(CannotShare, match=FORWARD_GRAPH.name):
        logs[0]["graph"].backward()
    with torch.no_grad():
        logs = results(schedule_with(), model)
    assert not any(log["enabled"] or log["graph"].requires_grad for log in logs)


def test_results_of_frozen_weights_have_no_graph():
    model = small_model(wrap_ddp=False).requires_grad_(False)
    for schedule in (stock_schedule(), schedule_with()):
        assert not any(log["graph"].requires_grad for log in results(schedule, model))
