"""Losses of routers and of multi-token prediction that are scaled by microbatch, on several ranks.

In a pipeline stock's backward of a microbatch reads the number of a later one, on all stages but
the last (run/execute/auxiliary.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.refusals.table import ACROSS_SCALES, SCALES_INTERLEAVED
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import cp_layout
from tests.harness import hybrid, steps
from tests.harness.ranks import run_ranks
from tests.harness.scales import Varying
from tests.harness.steps import Contract

pytestmark = pytest.mark.turns

LOSSES: dict[str, Any] = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [1.0, 0.7], "moe_z_loss_coeff": 0.5, "moe_router_dtype": "fp64",
    "mtp_loss_scaling_factor": 3.0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layout, fields of PrefixConfig, and layers of multi-token prediction."""

    layout: Layout
    prefix: dict[str, Any] = field(default_factory=dict)
    further: int = 0
    num_layers: int = 2


CASES = {
    "PP2": Case(Layout(pp=2), further=1),
    "PP3": Case(Layout(pp=3), num_layers=3),
    "EP2": Case(Layout(dp=2, ep=2), further=1),
    "PP2 EP2": Case(Layout(pp=2, dp=2, ep=2)),
    "CP2": Case(Layout(cp=2)),
    "TP2": Case(Layout(tp=2, sequence_parallel=True), further=1),
    "across ranks": Case(Layout(dp=2), {"across_ranks": "on"}),
}


def step(case: Case, trainer: Contract, schedule: Any) -> dict[str, Any]:
    """This rank's gradients after a step; data-parallel ranks have rollouts of their own."""
    layout = case.layout
    number = dist.get_rank() // (layout.tp * layout.cp) % layout.dp
    items = hybrid.items()[:4][number :: layout.dp]
    for item in items if layout.cp * layout.tp > 1 else ():
        length = item["tokens"].shape[1] // 4 * 4
        held = cp_layout.rank_positions(
            length, parallel_state.get_context_parallel_rank(), layout.cp
        )
        for name in ("tokens", "labels", "loss_mask", "position_ids", "weight"):
            item[name] = item[name][:, held]
    spec = resolve(
        "tiny-moe", num_layers=case.num_layers, mtp_num_layers=case.further or None
    ).with_vocab(64)
    chunks = build_model(spec, layout=layout, dtype="float64", config_overrides=LOSSES)
    for chunk in chunks:
        trainer.configure(chunk)
        steps.zero_gradients(chunk)
    forget_logged_losses()
    many = len(chunks) > 1
    schedule(
        forward_step_func=trainer.step, model=chunks if many else chunks[0],
        data_iterator=[iter(items) for _ in chunks] if many else iter(items),
        num_microbatches=len(items), seq_length=64, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    return steps.gradients(chunks[0])


def compare(case: Case, way: str) -> int:
    """Gradients, and calls of the functions, are the stock schedule's; how many calls there are."""
    runtime.initialize(case.layout)
    trainer = Varying(way=way)
    expected = step(case, trainer, PrefixSchedule(PrefixConfig(mode="off")))
    called = trainer.state.called
    ours = PrefixSchedule(PrefixConfig(min_gain=0, kernel="math", **case.prefix))
    found = step(case, trainer, ours)
    terms = {name: float(one.abs().max()) for name, one in expected.items()}
    steps.assert_gradients(found, steps.Reference(expected, terms), 400)
    assert trainer.state.called == called
    assert ours.report is not None and ours.report.decision.share
    assert len({number for _, number in called}) > (1 if way == "before" else 0)
    return len(called)


WAYS = [(name, "before") for name in ("PP2", "PP2 EP2", "CP2", "TP2", "across ranks")]
WAYS += [(name, "calls") for name in ("PP3", "EP2")]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_every_token_has_the_scale_that_stock_gives_it(name: str, way: str) -> None:
    case = CASES[name]
    assert all(run_ranks(case.layout.world_size, compare, case, way))


def refused(case: Case, trainer: Contract) -> str:
    """What the schedule says of a step in mode "on"."""
    runtime.initialize(case.layout)
    try:
        step(case, trainer, PrefixSchedule(PrefixConfig(min_gain=0, **case.prefix)))
    except CannotShare as error:
        return str(error)
    return ""


VIRTUAL = Case(Layout(pp=2, vpp=2), num_layers=4)
CROSSING = Case(Layout(dp=2), {"across_ranks": "on"}, further=1)


@pytest.mark.parametrize(
    ("case", "refusal"), [(VIRTUAL, SCALES_INTERLEAVED), (CROSSING, ACROSS_SCALES)]
)
def test_what_is_not_known_in_time_is_refused(case: Case, refusal: Any) -> None:
    found = run_ranks(case.layout.world_size, refused, case, Varying())
    assert all(text.startswith(refusal.name) for text in found)
    assert not any(run_ranks(case.layout.world_size, refused, case, Contract(scale=2.0)))
