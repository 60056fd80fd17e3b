"""Model calls on several ranks that end, or that ranks with unequal memory make; those of every
form are rows of the table of cases."""

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.plan import step_planner
from megatron_prefix.run.execute import memory_control
from tests.harness.calls import VOCAB, Form, Trainer, assert_shared, run_step
from tests.harness.own_heads import HEADS, HeadForm, HeadTrainer, put_into
from tests.harness.ranks import check_cases, run_ranks

CONFIG = PrefixConfig(min_gain=0, segment_tokens=24, chunk_tokens=8, kernel="math")


@dataclass(frozen=True)
class Case:
    """A form of model call, and what is special about its model or its schedule."""

    form: Form
    model: str = "tiny-qwen3"
    build: dict[str, Any] = field(default_factory=dict)
    prefix: dict[str, Any] = field(default_factory=dict)
    forward_only: bool = False


def built(case, layout):
    """Model chunks with one layer each, in fp64, for messages of any length."""
    layers = max(2, layout.pp * layout.vpp)
    spec = resolve(case.model, num_layers=layers).with_vocab(VOCAB)
    return build_model(
        spec, layout=layout, dtype="float64", **case.build,
        config_overrides={"variable_seq_lengths": True},
    )  # fmt: skip


# What falls back, fails or is refused -------------------------------------------------------------


def with_unequal_memory(layout):
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
    return [segment.padded_length for segment in schedule.report.forest.segments]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(pp=2)], ids=str)
def test_ranks_with_unequal_memory_choose_one_length_of_segments(layout):
    first, *others = run_ranks(layout.world_size, with_unequal_memory, layout)
    assert others == [first] and max(first) < 200


def step_without_data(rank):
    """What a rank of two says when `rank` cannot read; the next step is exact."""
    layout = Layout(pp=2)
    runtime.initialize(layout)
    form = Form(pad=2, where="ends")
    chunks, schedule = built(Case(form), layout), PrefixSchedule(CONFIG)
    trainer = Trainer(form, 0, layout)
    if torch.distributed.get_rank() == rank:
        trainer.batches[2] = None
    found = "", ""
    try:
        run_step(schedule, trainer, chunks)
    except Exception as error:  # noqa: BLE001  # what it is the test looks at
        found = type(error).__name__, str(error)
    several = [Trainer(form, 1, layout) for _ in range(2)]
    expected = run_step(stock_schedule(), several[0], chunks)
    assert_shared(run_step(schedule, several[1], chunks), expected, schedule, several[1])
    runtime.shutdown()
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_cannot_read_its_data_ends_the_step_on_all(rank):
    found = run_ranks(2, step_without_data, rank)
    kind, message = found[rank]
    assert kind == "TypeError"
    reason = f"the step ends on all ranks: rank {rank}: TypeError: {message}"
    assert found[1 - rank] == ("StepFailed", reason)


def under_autocast():
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

    def step(iterator, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return stock(iterator, model)

    trainer.step = step
    run_step(PrefixSchedule(CONFIG), trainer, chunks, forward_only=True)
    runtime.shutdown()
    return seen


def test_segments_run_under_the_calls_autocast_on_every_stage():
    for seen in run_ranks(2, under_autocast):
        assert seen and all(seen)


def forms(*heads, **fields):
    """A case for each head."""
    return {head: Case(HeadForm(head=head, **fields)) for head in heads or HEADS}


ONE = {
    **forms(),
    **{f"{name}, rows": case for name, case in forms(packed=False).items()},
    "kernels, no mask": Case(HeadForm(mask=False, pad=4)),
    "filled, forward only": Case(HeadForm(head="filled"), forward_only=True),
    "filled, recomputed": Case(
        HeadForm(head="filled"), build={"recompute": "full"}, prefix={"memory": "recompute"}
    ),
    "filled, which says something": Case(HeadForm(head="filled", scale=0.5)),
    "moved, experts": Case(HeadForm(head="moved"), model="tiny-moe"),
}
JOBS = {
    "one rank": (Layout(), ONE),
    "TP2": (Layout(tp=2), forms("filled")),
    "TP2 SP": (Layout(tp=2, sequence_parallel=True), forms(pad=2)),
    "PP2": (Layout(pp=2), forms(where="ends")),
    "CP2": (Layout(cp=2), forms("kernels", "filled")),
}


class NoLoss(HeadTrainer):
    """No rollout carries loss, and all of them begin alike: next to nothing is computed."""

    def samples(self, seed, num):
        found = super().samples(seed, num)
        for tokens, trained in found:
            tokens[:2], trained[:] = 5, False
        return found


def without_loss(head, packed):
    """Logs of a step without loss, and whether anything has a gradient."""
    runtime.initialize(Layout())
    form = HeadForm(head=head, packed=packed)
    chunks = built(Case(form), Layout())
    put_into(chunks[0], head)
    logs, gradients = run_step(PrefixSchedule(CONFIG), NoLoss(form, 0, Layout()), chunks)
    runtime.shutdown()
    return len(logs), any(bool(gradient.any()) for gradient in gradients.values())


@pytest.mark.parametrize(("head", "packed"), zip(HEADS, (True, False, True), strict=True))
def test_a_step_without_loss_is_answered_in_the_shapes_of_heads(head, packed):
    assert run_ranks(1, without_loss, head, packed) == [(len(HeadForm().sizes), False)]


def compare(case, layout):
    """Ours against the stock schedule on the same calls of the same model."""
    chunks = built(case, layout)
    for chunk in chunks:
        put_into(chunk, case.form.head)
    stock, ours = (HeadTrainer(case.form, 0, layout) for _ in range(2))
    options = {"forward_only": case.forward_only}
    schedule = PrefixSchedule(PrefixConfig(**{**vars(CONFIG), **case.prefix}))
    with torch.no_grad() if case.forward_only else torch.enable_grad():
        expected = run_step(stock_schedule(), stock, chunks, **options)
        found = run_step(schedule, ours, chunks, **options)
    assert_shared(found, expected, schedule, ours)
    assert ours.reads == stock.reads and sorted(ours.ended) == sorted(stock.ended)
    assert [log["number"] for log in found.logs] == [log["number"] for log in expected.logs]
    if case.forward_only:
        assert ours.order == stock.order
    assert case.forward_only or any(gradient.any() for gradient in expected.gradients.values())


@pytest.mark.parametrize("job", JOBS)
def test_heads_run_where_their_output_is_asked_for(job):
    check_cases(*JOBS[job], compare)
