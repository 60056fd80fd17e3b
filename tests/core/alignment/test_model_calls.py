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
from tests.harness.calls import ROWS, VOCAB, Form, Trainer, assert_gradients, run_step
from tests.harness.cases import check_cases
from tests.harness.ranks import run_ranks
from tests.harness.rows import through

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
    "rows, one sample each": Case(Form(packed=False, sizes=(1, 1, 1, 1, 1))),
    "rows of unequal samples": Case(Form(packed=False, sizes=(3, 3, 1))),
    "rows, logits divided in place": Case(Form(packed=False, logits=True)),
    "packed": Case(Form()),
    "packed, padded": Case(Form(pad=8)),
    "packed, without a mask": Case(Form(mask=False)),
    "packed, logits": Case(Form(logits=True)),
    "packed, logits, no mask": Case(Form(logits=True, mask=False, pad=4)),
    "packed, mean over tokens": Case(Form(), overrides={"calculate_per_token_loss": True}),
    "packed, forward only": Case(Form(), forward_only=True),
    "packed, logits, forward only": Case(Form(logits=True), forward_only=True),
    "rows, logits, forward only": Case(Form(packed=False, logits=True), forward_only=True),
    "numbers as microbatches": Case(Form(indices=True)),
    "recomputed": Case(Form(), build={"recompute": "full"}, prefix={"memory": "recompute"}),
    "offloaded": Case(Form(), prefix={"memory": "offload"}),
    "losses in leaves": Case(Form(), prefix={"loss_in_leaves": True}),
    **{
        f"tails, {name}": Case(Form(tails=True, **form), **case)
        for name, (form, case) in {
            "packed": ({"pad": 4}, {}),
            "rows": ({"packed": False}, {}),
            "rows, a mean": ({"packed": False}, {"overrides": {"calculate_per_token_loss": True}}),
            "logits": ({"logits": True}, {}),
            "forward only": ({}, {"forward_only": True}),
            "recomputed": ({}, {"build": {"recompute": "full"}, "prefix": {"memory": "recompute"}}),
            "losses in leaves": ({}, {"prefix": {"loss_in_leaves": True}}),
            "experts": ({}, {"model": "tiny-moe", "overrides": NO_ROUTERS}),
            "experts that count": ({}, {"model": "tiny-moe", "overrides": ROUTERS}),
        }.items()
    },
}
TP2 = {
    "packed": Case(Form(pad=2)),
    "packed, logits": Case(Form(logits=True, pad=2)),
    "rows": Case(ROWS),
    "tails": Case(Form(pad=2, tails=True)),
    "one iterator": Case(Form(by_tp_rank_0=True)),
}
PP2 = {
    "packed": Case(Form(pad=2)),
    "packed, data at the ends": Case(Form(where="ends")),
    "tails, data at the ends": Case(Form(where="ends", tails=True)),
    "packed, logits, data at the ends": Case(Form(where="ends", logits=True)),
    "rows, data at the ends": Case(Form(packed=False, where="ends", sizes=(2, 2, 2))),
    "forward only": Case(Form(logits=True), forward_only=True),
    "freed outputs": Case(Form(), overrides={"deallocate_pipeline_outputs": True}),
}
PP4 = {"data at the ends": Case(Form(where="ends")), "rows": Case(ROWS)}
VPP = {
    "packed": Case(Form(pad=2, tails=True)),
    "data at the ends": Case(Form(where="ends", logits=True)),
}
CP2 = {
    "packed": Case(Form()),
    "tails": Case(Form(tails=True)),
    "tails, rows": Case(Form(packed=False, tails=True)),
    "packed, logits": Case(Form(logits=True)),
    "rows": Case(ROWS),
    "no mask, forward only": Case(Form(mask=False), forward_only=True),
}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 5000}
DP2 = {
    "plain": Case(Form()),
    "distributed optimizer, overlap": Case(Form(pad=4), build=SHARDED),
    "tails, across ranks": Case(Form(tails=True), prefix={"across_ranks": "on"}),
}
BY_SAMPLE = {**ROUTERS, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
             "moe_aux_loss_coeff": [0.05, 0.1]}  # fmt: skip
PACKS_BY_SAMPLE = Case(Form(pad=4), model="tiny-moe", overrides=BY_SAMPLE)
EP2 = {
    "auxiliary losses": Case(Form(pad=4), model="tiny-moe", overrides=ROUTERS),
    "balanced by sample": Case(
        ROWS, model="tiny-moe",
        overrides={**ROUTERS, "moe_router_load_balancing_type": "seq_aux_loss"},
    ),
}  # fmt: skip
EP2["tails"] = Case(Form(pad=4, tails=True), model="tiny-moe", overrides=NO_ROUTERS)
EP2["packs balanced by sample"] = PACKS_BY_SAMPLE
CP2["packs balanced by sample"] = PACKS_BY_SAMPLE
JOBS = {
    "one rank": (Layout(), {**ONE, "packs balanced by sample": PACKS_BY_SAMPLE}),
    "TP2": (Layout(tp=2), TP2),
    "TP2 SP": (
        Layout(tp=2, sequence_parallel=True),
        {k: TP2[k] for k in ("packed", "rows", "tails")},
    ),
    "PP2": (Layout(pp=2), PP2),
    "PP4": (Layout(pp=4), PP4),
    "PP2 VPP2": (Layout(pp=2, vpp=2), VPP),
    "CP2": (Layout(cp=2), CP2),
    "DP2": (Layout(dp=2), DP2),
    "EP2": (Layout(ep=2, dp=2), EP2),
    "TP2 SP PP2": (Layout(tp=2, pp=2, sequence_parallel=True), {"packed": Case(Form(pad=2))}),
}


PRODUCTS = {
    "one rank": {"packed, logits, no mask", "packed, logits, forward only", "tails, rows, a mean",
                 "tails, recomputed", "tails, losses in leaves", "packs balanced by sample"},
    # With sequence parallelism there is more to do of these.
    "TP2": {"packed", "rows", "tails"},
    "PP2": {"tails, data at the ends", "packed, data at the ends"},
    "PP4": {"rows"},
    "CP2": {"tails", "packed, logits", "no mask, forward only"},
    "EP2": {"tails"},
}  # fmt: skip
"""Of each job the cases whose values stand in others: their own job's, or other jobs'."""


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
    names = through(every, PRODUCTS.get(job, ()))
    check_cases(layout, {name: every[name] for name in names}, compare)


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


def fall_back(layout: Layout, prefix: dict[str, Any]) -> bool:
    """The stock schedule to the last bit, with as many reads, three times."""
    runtime.initialize(layout)
    form = Form(pad=2, where="ends" if layout.pp > 1 else "everywhere")
    chunks = built(Case(form), layout)
    schedule = PrefixSchedule(PrefixConfig(**{**vars(CONFIG), **prefix}))
    same = []
    for seed in range(2):
        stock, ours = (Trainer(form, seed, layout) for _ in range(2))
        expected, gradients = run_step(stock_schedule(), stock, chunks)
        found, own = run_step(schedule, ours, chunks)
        assert schedule.report is not None and not schedule.report.decision.share
        same.append(
            stock.reads == ours.reads
            and stock.order == ours.order
            and all(torch.equal(a["nll"], b["nll"]) for a, b in zip(found, expected, strict=True))
            and all(torch.equal(own[name], gradient) for name, gradient in gradients.items())
        )
    runtime.shutdown()
    return all(same)


def unlike_ranks(layout: Layout) -> tuple[str, str]:
    """Why a data-parallel rank shares or not where one of them has nothing to share, twice."""
    from megatron.core import parallel_state

    runtime.initialize(layout)
    chunks = built(Case(Form(), build=SHARDED), layout)
    config = PrefixConfig(**{**vars(CONFIG), "mode": "auto", "min_speedup": 0.45})
    schedule, reasons = PrefixSchedule(config), []
    for seed in range(2):
        trainer = Trainer(Form(), seed, layout)
        if parallel_state.get_data_parallel_rank() == 0:
            for number, batch in enumerate(trainer.batches):
                batch["tokens"] = (batch["tokens"] + 7 * number + 1).flip(1) % VOCAB
        run_step(schedule, trainer, chunks)
        assert schedule.report is not None and not schedule.report.decision.share
        reasons.append(schedule.report.decision.reason)
    runtime.shutdown()
    return reasons[0], reasons[1]


def test_data_parallel_ranks_agree_if_reduction_order_shows() -> None:
    """Interleaved chunks with overlapped reductions: stock on one rank, ours on another, aborts."""
    layout = Layout(pp=2, vpp=2, dp=2)
    found = run_ranks(layout.world_size, unlike_ranks, layout)
    reasons = {reason for pair in found for reason in pair}
    assert any("another data-parallel rank takes the stock schedule" in one for one in reasons)
    assert any("predicted speedup" in one for one in reasons)


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


@pytest.mark.parametrize("prefix", [{"mode": "observe"}, {"mode": "auto", "min_speedup": 100.0}])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=2, vpp=2)])
def test_steps_that_do_not_share_are_megatrons_bit_for_bit(
    layout: Layout, prefix: dict[str, Any]
) -> None:
    assert all(run_ranks(layout.world_size, fall_back, layout, prefix))


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


def hooked(forward_only: bool) -> bool:
    """Whether a hook outside of the model, which doubles its output, counts once."""
    runtime.initialize(Layout())
    chunks = built(Case(Form(logits=True)), Layout())
    chunks[0].module.register_forward_hook(lambda module, args, output: output * 2.0)
    found = []
    for schedule in (stock_schedule(), PrefixSchedule(CONFIG)):
        trainer = Trainer(Form(logits=True), 0, Layout())
        found.append(run_step(schedule, trainer, chunks, forward_only=forward_only))
    (expected, gradients), (logs, own) = found
    for mine, theirs in zip(logs, expected, strict=True):
        assert_close(mine["nll"], theirs["nll"], 200)
    for name, gradient in gradients.items():
        assert_close(own[name] + 1.0, gradient + 1.0, 200)
    runtime.shutdown()
    return True


@pytest.mark.parametrize("forward_only", [False, True])
def test_hooks_around_the_model_count_once(forward_only: bool) -> None:
    assert run_ranks(1, hooked, forward_only) == [True]


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


def refusal(change: str, mode: str) -> str:
    """The message of a schedule on one rank for a forward step that changes something."""
    runtime.initialize(Layout())
    form = Form(packed=False, sizes=(1, 1, 1))
    chunks = built(Case(form), Layout())
    schedule = PrefixSchedule(PrefixConfig(**{**vars(CONFIG), "mode": mode}))
    trainer = Trainer(form, 0, Layout())

    def step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        given = {
            "input_ids": batch["tokens"], "position_ids": None, "attention_mask": None,
            "labels": batch["labels"], "loss_mask": batch["loss_mask"],
        }  # fmt: skip
        num = batch["tokens"].shape[1]
        if change == "reset mask":
            mask = torch.ones(1, 1, num, num, dtype=torch.bool).triu(1)
            mask[..., num // 2 :, : num // 2] = True
            given["attention_mask"] = mask
        if change == "eval":
            model.eval()
        output = batch["labels"].double() if change == "no call" else model(**given)
        if change == "two calls":
            output = model(**given)
        model.train()
        return output, trainer.loss_of(batch)

    trainer.step = step  # type: ignore[method-assign]
    try:
        run_step(schedule, trainer, chunks)
    except Exception as error:  # noqa: BLE001  # its text is the result
        return f"{type(error).__name__}: {error}"
    finally:
        runtime.shutdown()
    assert schedule.report is not None
    return schedule.report.decision.reason


@pytest.mark.parametrize(
    ("change", "message", "falls_back"),
    [
        ("reset mask", "CannotShare: the attention_mask of a model call is not causal", True),
        ("eval", "CannotShare: the forward step calls model.train() or model.eval()", True),
        ("no call", "CannotShare: the forward step does not call the model", True),
        ("two calls", "CannotShare: the forward step calls the model more than once", False),
    ],
)
def test_forward_steps_that_cannot_be_run_are_refused_by_name(
    change: str, message: str, falls_back: bool
) -> None:
    (found,) = run_ranks(1, refusal, change, "on")
    assert found.startswith(message)
    if falls_back:
        (found,) = run_ranks(1, refusal, change, "auto")
        assert found.startswith(message.partition(": ")[2])
