"""Multi-token prediction in layouts of several ranks, against the stock schedule in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_prefix.errors import CannotShare
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.runtime import Layout
from tests.core.alignment.test_overlap import Job, trees
from tests.core.layers.test_mtp_packs import WithPositions
from tests.harness import calls
from tests.harness.calls import Form
from tests.harness.one_group import schedule_with
from tests.harness.ranks import run_ranks


@pytest.mark.parametrize(("pp", "tied"), [(1, False), (2, True)])
def test_reductions_during_backwards(pp: int, tied: bool) -> None:
    """Three steps, also of the optimizer; the output layer, which may get a row of this loss or
    none, is waited for."""
    model = {"mtp_num_layers": 1, "tie_embeddings": tied}
    job = Job(layout=Layout(pp=pp, dp=2), model=model)
    expected, found = job.runs(trees, ("SSS", False), ("PPP", True))
    for ours, stock in zip(found, expected, strict=True):
        for parameter, value in stock.parameters.items():
            assert_close(ours.parameters[parameter], value, 3000, what=parameter)
        assert all(step.reduced_once() and not step.late for step in ours.watched)
    assert any(step.early for step in found[0].watched)


def refused_on(layout: Layout, change: Callable[[Any, int], None], form: Form) -> list[str]:
    """Why each rank of a step in mode "on" does not run it."""

    def rank_of() -> str:
        runtime.initialize(layout)
        trainer = WithPositions(form, 3, layout)
        change(trainer, torch.distributed.get_rank())
        spec = resolve("tiny-llama", num_layers=2, mtp_num_layers=1).with_vocab(64)
        chunks = build_model(spec, layout=layout, dtype="float64")
        try:
            calls.run_step(schedule_with(), trainer, chunks)
        except CannotShare as error:
            return str(error)
        return ""

    return run_ranks(layout.world_size, rank_of, timeout_s=120)


def test_a_last_stage_without_tokens_is_refused_on_all() -> None:
    """Megatron's own schedule fails there."""
    found = refused_on(Layout(pp=2), lambda trainer, rank: None, Form(where="ends"))
    assert all("of the last pipeline stage have no input_ids" in why for why in found), found


def test_a_rank_without_any_weight_is_refused_on_all() -> None:
    def change(trainer: Any, rank: int) -> None:
        if rank:
            trainer.batches[1]["loss_mask"].zero_()

    found = refused_on(Layout(dp=2), change, Form())
    assert all("no position for the loss of multi-token" in why for why in found), found
