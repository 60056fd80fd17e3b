"""Functions that scale the losses of every microbatch by another number, as dynamic batches have
it: losses of routers and of multi-token prediction are scaled by Megatron's schedule, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from torch import Tensor

from megatron_prefix.errors import CannotShare
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.megatron.scale_functions import own_scale_functions
from megatron_prefix.refusals.table import SCALES_ORDER
from megatron_prefix.run import planning
from tests.harness import hybrid, steps
from tests.harness.mtp import assert_same, model_of, run
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.scales import WAYS, Varying
from tests.harness.steps import Contract

LOSSES: dict[str, Any] = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [1.0, 0.7, 2.0], "moe_z_loss_coeff": 0.5, "moe_router_dtype": "fp64",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"spec": {"mtp_num_layers": None}},
    "experts": {
        "name": "tiny-moe", "spec": {"mtp_num_layers": None}, "config_overrides": LOSSES,
    },
    "experts, further tokens": {"name": "tiny-moe", "config_overrides": LOSSES},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize("way", WAYS)
def test_every_token_has_the_scale_of_its_microbatch(way: str) -> None:
    """And the functions are called as by the stock schedule; tests/test_cases.py has more plans."""
    items, trainer = hybrid.items(), Varying(way=way)
    for model in ("dense", "experts, further tokens"):
        expected = run(stock_schedule(), model_of(**MODELS[model]), trainer, items)
        called = trainer.state.called
        assert called and (way == "calls" or len({number for _, number in called}) > 2)
        schedule = schedule_with(segment_tokens=64)
        assert_same(run(schedule, model_of(**MODELS[model]), trainer, items), expected, items)
        assert trainer.state.called == called
        assert schedule.report is not None and schedule.report.decision.share


class Items(list[Any]):
    """Microbatches; each one that is drawn is told first, by what no forward step names."""

    def __init__(self, tell: Callable[[float], Any]) -> None:
        super().__init__(hybrid.items())
        self._tell = tell

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self._tell(1.0 + item["uid"])
            yield item


def scaled_step(schedule: Any, scale: Callable[[Tensor], Tensor], items: Items) -> dict[str, Any]:
    """The gradients of a step whose losses a function scales."""
    model = model_of(**MODELS["experts"])
    unwrap(model).config.grad_scale_func = scale
    forget_logged_losses()
    steps.zero_gradients(model)
    steps.call(schedule, Contract().step, model, items)
    return steps.gradients(model)


def test_a_number_that_the_data_iterator_sets() -> None:
    held = {"scale": 1.0}
    items = Items(functools.partial(held.__setitem__, "scale"))
    expected, found = (
        scaled_step(schedule, lambda loss: loss * held["scale"], items)
        for schedule in (stock_schedule(), schedule_with())
    )
    terms = {name: float(one.abs().max()) for name, one in expected.items()}
    steps.assert_gradients(found, steps.Reference(expected, terms), 1000)


def test_a_number_that_is_written_in_place_is_seen() -> None:
    """Nothing can be bound again: the first step, which stock runs, shows it."""
    number = torch.ones(())
    schedule = schedule_with(looks_first=True, mode="auto", min_speedup=0.01)
    items = Items(number.fill_)
    expected, found = (
        scaled_step(one, lambda loss: loss * number, items) for one in (stock_schedule(), schedule)
    )
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    reason = schedule.report.decision.reason  # type: ignore[union-attr]
    assert "is overwritten by a later forward step" in reason


def test_schedules_that_are_compared_call_functions_alike() -> None:
    held = {"calls": 0}

    def scale(loss: Tensor) -> Tensor:
        held["calls"] += 1
        return loss * (0.5 + held["calls"] % 5)

    schedule, items = schedule_with(verify=1), Items(held.get)
    expected = scaled_step(stock_schedule(), scale, items)
    held["calls"] = 0
    found = scaled_step(schedule, scale, items)
    assert schedule.report.features["verify"].failure == ""  # type: ignore[union-attr]
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_calls_in_another_order_are_the_stock_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "are_in_order", lambda *_: False)
    items, trainer = hybrid.items(), Varying(way="calls")
    model, twin = (model_of(**MODELS["dense"]) for _ in range(2))
    expected = run(stock_schedule(), twin, trainer, items)
    schedule = schedule_with(mode="auto", min_speedup=0.01)
    found = run(schedule, model, trainer, items)
    assert all(torch.equal(found.gradients[n], g) for n, g in expected.gradients.items())
    decision = schedule.report.decision  # type: ignore[union-attr]
    assert decision.fallback and decision.reason.startswith(SCALES_ORDER.name)
    with pytest.raises(CannotShare, match="in another order than microbatches"):
        run(schedule_with(), model, trainer, items)
    run(schedule_with(), model, Contract(scale=2.0), items)  # Megatron's own


def test_an_optimizers_own_function_is_not_the_trainers() -> None:
    model = small_model()
    for trainer, num in ((Contract(), 0), (Contract(scale=2.0), 0), (Varying(), 1)):
        trainer.configure(model)
        assert len(own_scale_functions(unwrap(model).config)) == num
