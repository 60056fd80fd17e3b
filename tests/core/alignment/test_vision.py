"""Vision-language models: positions of three rows, embeddings in place of tokens, rows that layers
add; in every layout against the stock schedule."""

from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.verify.judge import longest_sums
from megatron_prefix.features.verify.logs import logged_ahead
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.megatron.install import language_model
from tests.harness import hybrid, steps, vision, vision_own
from tests.harness.calls import Form, assert_shared, run_step
from tests.harness.ranks import check_cases

CONFIG = {"min_gain": 0, "segment_tokens": 24, "chunk_tokens": 8, "kernel": "math"}
SIZES = (2, 3, 2, 3)
PACKED, PADDED = Form(sizes=SIZES), Form(sizes=SIZES, pad=4)
ROWS, SINGLE = Form(packed=False, sizes=SIZES), Form(packed=False, sizes=(1,) * 9)
QWEN3 = "Megatron-Bridge, Qwen3-VL"


class Case(NamedTuple):
    """What is special about a step: of its model calls, its model (tests/harness/vision.py) and the
    options of that, and of the schedule."""

    form: Form = PACKED
    model: str = QWEN3
    build: Any = MappingProxyType({})
    prefix: Any = MappingProxyType({})
    images: bool = True
    forward_only: bool = False
    splits: bool = False  # ranks share the images of a call, so that their runs are not counted
    cuts_labels: bool = False  # see `vision.Trainer`


RECURRENT = Case(ROWS, "mbridge, GLM-4V", build={"spec": hybrid.GDN, "num_layers": 4})
OVERLAP = Case(build={"overlap_grad_reduce": True, "bucket_size": 5000})
TIED = Case(build={**OVERLAP.build, "tied": True})
EXPERTS = Case(PADDED, build={
    "spec": "tiny-moe", "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
})  # fmt: skip
OWN = Case(
    Form(packed=False, sizes=SIZES, pad=4), "mbridge, GLM-4V", build={"make": vision_own.Model}
)
"""A model that is its own language model."""
PLAIN, WHOLE = "mbridge, GLM-4V", OWN.form
FURTHER = Case(WHOLE, PLAIN, build={
    "fields": {"mtp_num_layers": 2}, "mtp_loss_scaling_factor": 3.0, "tied": True,
    "calculate_per_token_loss": True,
})  # fmt: skip
ONE = {
    "packed": Case(), "own": OWN, "rows": Case(ROWS), "text": Case(images=False),
    "experts": EXPERTS, "recurrent layers": RECURRENT,
    "frozen tower": Case(build={"freeze": True}),
    "forward only": Case(Form(sizes=SIZES, logits=True), forward_only=True),
    "recomputed layers": Case(
        model="mbridge, GLM-4V", build={"recompute": "full"}, prefix={"memory": "recompute"}
    ),
    "offload": Case(prefix={"memory": "offload"}), "overlap": OVERLAP,
    "further": FURTHER._replace(form=PACKED), "further, own": FURTHER._replace(
        build={**OWN.build, "fields": {"mtp_num_layers": 1}}
    ),
}  # fmt: skip
ACROSS = Case(prefix={"across_ranks": "on"})
KINDS = [*vision.KINDS]
"""Models differ where ranks slice what is given, so all of them run there: each layout with others
has those whose calls differ in it."""
JOBS = {
    "one rank": (Layout(), ONE),
    "TP2 SP": (
        Layout(tp=2, sequence_parallel=True),
        {"further": FURTHER._replace(build={**FURTHER.build, "tied": False})}
        | {name: Case(PADDED, name) for name in KINDS},
    ),
    "PP2": (
        Layout(pp=2),
        {"packed": Case(PADDED), "shows": Case(PADDED, "mbridge, GLM-4V"), "own": OWN,
         "recurrent layers": RECURRENT, "further": FURTHER},
    ),
    "CP2": (
        Layout(cp=2),
        {**{name: Case(ROWS, name) for name in (QWEN3, "mbridge, Qwen3-VL", "mbridge, GLM-4V")},
         "positions first": Case(SINGLE, "mcore-bridge, Qwen3-VL"),
         "further": FURTHER._replace(form=ROWS)},
    ),
    "CP2 TP2 SP": (Layout(cp=2, tp=2, sequence_parallel=True), {"rows": Case(ROWS)}),
    "DP2": (
        Layout(dp=2),
        {"packed": Case(), "tied": TIED, "across": ACROSS,
         "own, across": OWN._replace(prefix=ACROSS.prefix),
         "further, across": FURTHER._replace(prefix=ACROSS.prefix)},
    ),
    "EP2": (Layout(ep=2, dp=2), {  # the one with more layers that log first
        "further": FURTHER._replace(build={**EXPERTS.build, **FURTHER.build, "tied": False}),
        "experts": EXPERTS,
    }),
}  # fmt: skip


def further_log():
    """Megatron's log of multi-token prediction, emptied."""
    found = [each.clone() for each in logged_ahead().values()]
    MTPLossLoggingHelper.tracker.clear()
    return found


def compare(case, layout):
    """Ours against the stock schedule on the same calls."""
    from megatron.core import parallel_state

    chunks = vision.build(case.model, layout, **case.build)
    assert language_model(chunks[0]) is chunks[0].module.language_model
    dealt = parallel_state.get_data_parallel_rank(), layout.dp
    some = (case.form, 3, layout, case.images, dealt)
    stock, ours = (vision.Trainer(*some, cuts_labels=case.cuts_labels) for _ in range(2))
    schedule = PrefixSchedule(PrefixConfig(**{**CONFIG, **case.prefix}))
    options = {"forward_only": case.forward_only}
    counted = vision.Counted(vision.tower_of(chunks[0].module))
    with torch.no_grad() if case.forward_only else torch.enable_grad():
        expected = run_step(stock_schedule(), stock, chunks, **options)
        asked, log = counted.rows, further_log()
        if "overlap_grad_reduce" in case.build:  # what backwards give is known from the second on
            run_step(schedule, vision.Trainer(*some), chunks)
        counted.rows = 0
        found = run_step(schedule, ours, chunks, **options)
    again = not (case.build.get("freeze") or case.forward_only)
    every, different = ours.num_patches
    if not case.splits:
        assert every * counted.rows == (1 + again) * different * asked
    assert counted.rows < asked or not asked or case.splits
    sums = longest_sums(language_model(chunks[0]).config)
    forest = assert_shared(found, expected, schedule, ours, sums=sums)
    if case.prefix.get("across_ranks"):
        assert forest.exchanges
    elif layout.cp == 1:  # else ranks have other positions
        torch.testing.assert_close(further_log(), log)
    for name, gradient in expected.gradients.items():
        trained = not (case.build.get("freeze") or case.forward_only or not case.images)
        assert float(gradient.abs().max()) > 0 or not trained or "language_model" in name, name


@pytest.mark.parametrize("job", JOBS)
def test_steps_are_the_stock_schedules(job):
    check_cases(*JOBS[job], compare)


def refuse_packs(_, layout):
    """A model that may have packed rows inside is given packs."""
    chunks = vision.build(OWN.model, layout, **OWN.build)
    with pytest.raises(CannotShare, match="a pack in Qwen2_5_VLModel"):
        run_step(PrefixSchedule(PrefixConfig(**CONFIG)), vision.Trainer(PACKED, 3, layout), chunks)


def test_packs_in_a_model_that_is_its_own_language_model():
    check_cases(Layout(), {"packs": None}, refuse_packs)


def fall_back(case, layout):
    """Nothing is wrong with a step that the stock schedule takes after all."""
    chunks = vision.build(case.model, layout, **case.build)
    stock, ours = (vision.Trainer(case.form, 3, layout) for _ in range(2))
    _, gradients = run_step(stock_schedule(), stock, chunks)
    schedule = PrefixSchedule(PrefixConfig(**{**CONFIG, "mode": "auto", "min_speedup": 99}))
    _, own = run_step(schedule, ours, chunks)
    assert schedule.report is not None and not schedule.report.decision.share
    steps.assert_gradients(own, gradients, 400, (0, 0))


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_the_stock_schedule_can_still_take_a_step(layout):
    check_cases(layout, {"packed": Case(), "overlap": OVERLAP, "own": OWN}, fall_back)
