"""What the first step of a kind tells, and leaves alone; rows of odd trainers:
tests/test_cases_of_trainers.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix.refusals import table
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import one_group, steps
from tests.harness.one_group import assert_bitwise
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract, Microbatch


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


class Trainer:
    """Its forward step and loss keep what they share in attributes."""

    last, log = 0.0, ()

    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = next(iterator)
        output = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )  # fmt: skip
        return output, partial(self.loss, batch)

    def loss(self, batch: Microbatch, output: Any) -> Any:
        return Contract().loss_func(batch)(output)


def watching(mode: str = "auto") -> PrefixSchedule:
    return one_group.schedule_with(looks_first=True, mode=mode, min_speedup=0.01)


def two_steps(schedule: Any, trainer: Any) -> list[Any]:
    model = small_model()
    return [one_group.run(schedule, model, trainer) for _ in range(2)]


def test_mode_auto_gives_untried_fp8_to_the_stock_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_prefix.run.route.is_untried", lambda config: True)
    schedule = watching()
    wanted = two_steps(stock_schedule(), Trainer())
    for mine, its in zip(two_steps(schedule, Trainer()), wanted, strict=True):
        assert_bitwise(mine, its)
    assert schedule.report.decision.reason.endswith(table.FP8_UNTRIED.fix)


class Twice(Trainer):
    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        items = [next(iterator)]
        other, _ = super().step(iter(items), model)
        output, loss = super().step(iter(items), model)
        return output + 0 * other.detach(), loss


def test_a_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    two_steps(watching(), Twice())
    assert sum("stock schedule for this step" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("on", "prefix sharing is on: rank 0 computes {:,} of {:,} tokens ({:.1f}x predicted)"),
        (
            "observe",
            "prefix sharing is observed: rank 0 would compute {:,} of {:,} tokens ({:.1f}x"
            " predicted)",
        ),
    ],
)
def test_what_is_shared_is_logged_once(mode, line, caplog: pytest.LogCaptureFixture) -> None:
    schedule = watching(mode)
    two_steps(schedule, Trainer())
    forest = schedule.report.forest
    assert 0 < forest.executed_tokens < forest.raw_tokens
    predicted = schedule.report.decision.predicted_speedup
    expected = line.format(forest.executed_tokens, forest.raw_tokens, predicted)
    assert [text for text in caplog.messages if "prefix sharing is" in text] == [expected]


class OwnInfo(Trainer):
    """Its loss sets a number for itself; its forward step has the name for another, and not now."""

    def __init__(self) -> None:
        self.info: dict[str, int] = {}

    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = next(iterator)
        if self.last:
            batch = {**batch, "scale": batch["batch_num_tokens"]}
        return super().step(iter([batch]), model)

    def loss(self, batch: Microbatch, output: Any) -> Any:
        self.info["batch_num_tokens"] = batch["tokens"].numel()
        return super().loss(batch, output)


@pytest.mark.parametrize("version", ["", "0.9.1", "0.9.2"])
def test_what_verls_losses_set_for_themselves_is_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Of versions that were tried; elsewhere a name that both have may be read."""
    if version:
        monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
        monkeypatch.setattr(sys.modules["verl"], "__version__", version, raising=False)
    schedule = watching()
    two_steps(schedule, OwnInfo())
    decision = schedule.report.decision
    assert decision.share == (version == "0.9.1")
    assert decision.share or decision.reason.endswith(table.LOSS_LEAVES.fix)


class Touchy(Trainer):
    """What looking must not touch: a property that raises, and a tensor without strides."""

    def __init__(self) -> None:
        self.sparse = torch.eye(3).to_sparse()

    @property
    def world(self) -> Any:
        raise RuntimeError("not before the job has begun")

    def loss(self, batch: Microbatch, output: Any) -> Any:
        return (self.world, self.sparse) if self.log else super().loss(batch, output)


def test_looking_ends_no_step() -> None:
    schedule = watching()
    first, _ = two_steps(schedule, Touchy())
    assert_bitwise(first, two_steps(stock_schedule(), Touchy())[0])
    assert schedule.report.decision.share


class Unmasked(Trainer):
    """A loss that looks at positions that the call's loss_mask leaves out."""

    def loss(self, batch: Microbatch, output: Any) -> Any:
        return super().loss({**batch, "loss_mask": torch.ones_like(batch["loss_mask"])}, output)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_mask_over_tokens_leaves_out_no_position(mode: str) -> None:
    """ROLL's: its losses have masks of their own, over the positions that predict these tokens."""
    schedule = watching(mode)
    schedule.callbacks = Callbacks(masks_tokens=True)
    *_, (_, found) = two_steps(schedule, Unmasked())
    *_, (_, wanted) = two_steps(stock_schedule(), Unmasked())
    assert schedule.report.decision.share
    terms = {name: float(gradient.abs().max()) for name, gradient in wanted.items()}
    steps.assert_gradients(found, steps.Reference(wanted, terms), 1000)
