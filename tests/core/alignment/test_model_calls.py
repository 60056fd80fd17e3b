"""Model calls of every form, in every layout, answered as the stock schedule's are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import assert_close, tolerance
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.plan import step_planner
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.execute import memory_control
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import Forest
from tests.harness.calls import VOCAB, Form, Trainer, assert_gradients, run_step
from tests.harness.cases import check_cases
from tests.harness.ranks import run_ranks

CALLBACKS = Callbacks()
CONFIG = PrefixConfig(min_gain=0, segment_tokens=24, chunk_tokens=8, kernel="math")


@dataclass(frozen=True)
class Case:
    """A form of model call, and what is special about its model or its schedule."""

    form: Form
    model: str = "tiny-qwen3"
    spec: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)
    prefix: dict[str, Any] = field(default_factory=dict)
    forward_only: bool = False


ROUTERS = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
}
NO_ROUTERS = {**ROUTERS, "moe_router_load_balancing_type": "none", "moe_z_loss_coeff": None}
ONE = {
    "rows of unequal samples": Case(Form(packed=False, sizes=(3, 3, 1))),
    "losses in leaves": Case(Form(), prefix={"loss_in_leaves": True}),
    **{
        f"tails, {name}": Case(Form(tails=True, **form), **case)
        for name, (form, case) in {
            "packed": ({"pad": 4}, {}),
            "rows": ({"packed": False}, {}),
            "logits": ({"logits": True}, {}),
            "forward only": ({}, {"forward_only": True}),
            "experts": ({}, {"model": "tiny-moe", "overrides": NO_ROUTERS}),
            "experts that count": ({}, {"model": "tiny-moe", "overrides": ROUTERS}),
        }.items()
    },
}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 5000}
JOBS = {
    "one rank": (Layout(), ONE),
    "TP2": (Layout(tp=2), {"one iterator": Case(Form(by_tp_rank_0=True))}),
    "TP2 SP": (
        Layout(tp=2, sequence_parallel=True), {"tails": Case(Form(pad=2, tails=True))},
    ),
    "PP2 VPP2": (
        Layout(pp=2, vpp=2),
        {
            "tails": Case(Form(pad=2, tails=True)),
            "data at the ends": Case(Form(where="ends", logits=True)),
        },
    ),
    "CP2": (Layout(cp=2), {"tails, rows": Case(Form(packed=False, tails=True))}),
    "DP2": (
        Layout(dp=2),
        {"tails, across ranks": Case(Form(tails=True), prefix={"across_ranks": "on"})},
    ),
}  # fmt: skip
"""What rows of tests/test_cases.py have not: they have the other forms of calls."""


def built(case: Case, layout: Layout) -> list[Any]:
    """Model chunks with one layer each, in fp64, for messages of any length."""
    layers = max(2, layout.pp * layout.vpp)
    spec = resolve(case.model, num_layers=layers, **case.spec).with_vocab(VOCAB)
    return build_model(
        spec, layout=layout, dtype="float64", **case.build,
        config_overrides={"variable_seq_lengths": True, **case.overrides},
    )  # fmt: skip


def num_computed(forest: Forest) -> int:
    """Positions of all rollouts that any segment computes, for each of them."""
    spans = (span for segment in forest.segments for span in segment.spans)
    return sum(span.length * len(span.rollouts) for span in spans)


def compare(case: Case, layout: Layout) -> None:
    """Ours against the stock schedule on the same calls."""
    compare_with(case, layout, built(case, layout), Trainer)


def compare_with(
    case: Case,
    layout: Layout,
    chunks: list[Any],
    trainer: type[Trainer],
    callbacks: Callbacks = CALLBACKS,
) -> None:
    """The same, of a model and a kind of trainer that are given."""
    from megatron.core import parallel_state

    seed = parallel_state.get_data_parallel_rank()
    stock, ours = (trainer(case.form, seed, layout) for _ in range(2))
    options = {"forward_only": case.forward_only}
    schedule = PrefixSchedule(PrefixConfig(**{**vars(CONFIG), **case.prefix}), callbacks)
    with torch.no_grad() if case.forward_only else torch.enable_grad():
        expected, gradients = run_step(stock_schedule(), stock, chunks, **options)
        found, own = run_step(schedule, ours, chunks, **options)
    assert schedule.report is not None and schedule.report.decision.share
    forest = schedule.report.forest
    assert forest.executed_tokens < 0.9 * forest.raw_tokens
    if case.form.tails:
        needs = case.overrides is ROUTERS or case.forward_only
        assert needs == (num_computed(forest) == forest.raw_tokens)
    assert ours.reads == stock.reads and sorted(ours.ended) == sorted(stock.ended)
    assert [log["number"] for log in found] == [log["number"] for log in expected]
    if case.forward_only:
        assert ours.order == stock.order
    num = sum(batch["tokens"].numel() for batch in ours.batches) * layout.cp
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine["nll"], theirs["nll"], num)
    assert_gradients(own, gradients, num)
    assert case.forward_only or any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("job", list(JOBS))
def test_calls_are_answered_as_by_the_stock_schedule(job: str) -> None:
    layout, every = JOBS[job]
    check_cases(layout, every, compare)


class UnlikeMasks(Trainer):
    """Whose model calls have a mask on the first rank only."""

    def arguments(self, batch: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        return {"loss_mask": None} if torch.distributed.get_rank() else {}


def with_unlike_masks(layout: Layout) -> None:
    runtime.initialize(layout)
    case = Case(Form(tails=True))
    compare_with(case, layout, built(case, layout), UnlikeMasks)
    runtime.shutdown()


def test_ranks_that_know_masks_unlike_cut_off_the_same_tails() -> None:
    """A trainer's samples may fit the calls of one context-parallel rank and not of another."""
    run_ranks(2, with_unlike_masks, Layout(cp=2))


# What falls back, fails or is refused -------------------------------------------------------------


def with_unequal_memory(layout: Layout) -> list[int]:
    """Lengths of the segments of a step on a rank whose memory is not that of the others."""
    runtime.initialize(layout)
    case = Case(Form(pad=4) if layout.cp > 1 else Form())
    chunks = built(case, layout)
    config = PrefixConfig(**{**vars(CONFIG), "chunk_tokens": 0, "segment_tokens": "auto"})
    room = 10**5 if torch.distributed.get_rank() else 10**9
    with (
        mock.patch.object(memory_control, "free_bytes", return_value=room),
        mock.patch.object(step_planner, "SEGMENT_TOKENS", (16, 32, 64, 128, 256)),
    ):
        schedule = PrefixSchedule(config)
        run_step(schedule, Trainer(case.form, 0, layout), chunks)
    runtime.shutdown()
    assert schedule.report is not None
    return [segment.padded_length for segment in schedule.report.forest.segments]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(pp=2)], ids=str)
def test_ranks_with_unequal_memory_choose_one_length_of_segments(layout: Layout) -> None:
    first, *others = run_ranks(layout.world_size, with_unequal_memory, layout)
    assert others == [first] and max(first) < 200


def step_without_data(rank: int) -> tuple[str, str, bool]:
    """What a rank of two says when `rank` cannot read, and whether the next step is exact."""
    layout = Layout(pp=2)
    runtime.initialize(layout)
    form = Form(pad=2, where="ends")
    chunks = built(Case(form), layout)
    schedule = PrefixSchedule(CONFIG)
    trainer = Trainer(form, 0, layout)
    if torch.distributed.get_rank() == rank:
        trainer.batches[2] = None  # type: ignore[call-overload]
    found = "", ""
    try:
        run_step(schedule, trainer, chunks)
    except Exception as error:  # noqa: BLE001  # what it is the test looks at
        found = type(error).__name__, str(error)
    expected, gradients = run_step(stock_schedule(), Trainer(form, 1, layout), chunks)
    logs, own = run_step(schedule, Trainer(form, 1, layout), chunks)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    limit = tolerance(torch.float32, 200) * scale
    close = [bool((own[name] - g).abs().max() <= limit) for name, g in gradients.items()]
    runtime.shutdown()
    return *found, len(logs) == len(expected) and all(close)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_cannot_read_its_data_ends_the_step_on_all(rank: int) -> None:
    found = run_ranks(2, step_without_data, rank)
    kind, message, exact = found[rank]
    assert (kind, exact) == ("TypeError", True)
    reason = f"the step ends on all ranks: rank {rank}: TypeError: {message}"
    assert found[1 - rank] == ("StepFailed", reason, True)


def under_autocast() -> list[bool]:
    """Whether the decoder of a stage ran under the forward step's autocast, call by call."""
    layout = Layout(pp=2)
    runtime.initialize(layout)
    chunks = built(Case(Form(pad=2)), layout)
    seen: list[bool] = []
    chunks[0].module.decoder.register_forward_pre_hook(
        lambda *_: seen.append(torch.is_autocast_enabled("cpu"))
    )
    trainer = Trainer(Form(pad=2), 0, layout)
    stock = trainer.step

    def step(iterator: Any, model: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return stock(iterator, model)

    trainer.step = step  # type: ignore[method-assign]
    run_step(PrefixSchedule(CONFIG), trainer, chunks, forward_only=True)
    runtime.shutdown()
    return seen


def test_segments_run_under_the_calls_autocast_on_every_stage() -> None:
    for seen in run_ranks(2, under_autocast):
        assert seen and all(seen)
