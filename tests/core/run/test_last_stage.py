"""The last stage's model calls: their tokens say nothing, and its outputs are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.refusals import table
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import one_group
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Microbatch

STAGES = Layout(pp=2)


class Padded:
    """A trainer whose later stages get the tokens of another layout, as SkyRL's do."""

    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = next(iterator)
        tokens = batch["tokens"]
        if not unwrap(model).pre_process:
            tokens = tokens.new_zeros(3, 5)
        return model(tokens, batch["position_ids"], None), partial(self.loss, batch)

    def prepare(self, model: Any) -> None:
        """Before its first step."""

    def loss(self, batch: Microbatch, logits: Tensor) -> Any:
        labels = batch["labels"][:, : logits.shape[1]]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, {"loss": loss.detach()}


class Shortened(Padded):
    """And whose model returns one position less than it gets."""

    def prepare(self, model: Any) -> None:
        if model.post_process:
            stock = model.forward
            model.forward = lambda *args, **kwargs: stock(*args, **kwargs)[:, :-1]


class Scaled(Padded):
    """And that divides what the model returns by a temperature, in place and on every stage, as
    RLinf's does."""

    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        output, loss = super().step(iterator, model)
        output /= 2.0
        return output, loss


def two_steps(schedule: Any, trainer: Padded) -> Any:
    """Logs and gradients of the second of two steps on this rank, and why it was not shared."""
    model = small_model(layout=STAGES)
    trainer.prepare(unwrap(model))
    for _ in range(2):
        found = one_group.run(schedule, model, trainer)  # type: ignore[arg-type]
    decision = getattr(schedule, "report", None) and schedule.report.decision
    return found, "" if decision is None or decision.share else decision.reason


def on_rank(kind: type[Padded], mode: str) -> Any:
    runtime.initialize(STAGES)
    config = PrefixConfig(min_gain=0, kernel="math", mode=mode, min_speedup=0.01)
    found, reason = two_steps(PrefixSchedule(config, looks_first=True), kind())
    wanted, _ = two_steps(stock_schedule(), kind())
    return found, wanted, reason


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_tokens_of_another_layout_are_not_read(mode: str) -> None:
    for found, wanted, reason in run_ranks(2, on_rank, Padded, mode):
        assert not reason
        num = sum(item["tokens"].numel() for item in one_group.items())
        for mine, its in zip(found[0], wanted[0], strict=True):
            assert mine["loss"].item() == pytest.approx(its["loss"].item(), rel=1e-12)
        assert found[1].keys() == wanted[1].keys()
        for name, gradient in wanted[1].items():
            size = gradient.abs().max()
            assert (found[1][name] - gradient).abs().max() <= num * 1e-15 * size, name


def test_an_output_not_per_position_is_seen_by_what_came() -> None:
    for found, wanted, reason in run_ranks(2, on_rank, Shortened, "auto"):
        assert reason.endswith(table.OTHER_SHAPE.fix)
        assert " for 17 positions" in reason
        one_group.assert_bitwise(found, wanted)


def test_the_next_stage_gets_an_output_changed_in_place() -> None:
    for found, wanted, reason in run_ranks(2, on_rank, Scaled, "auto"):
        assert reason.endswith(table.OTHER_SENT.fix)
        one_group.assert_bitwise(found, wanted)
