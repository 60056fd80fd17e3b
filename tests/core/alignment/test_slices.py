"""Context-parallel ranks that hold contiguous parts of calls, against the stock schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_prefix.errors import CannotShare
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree.cp_layout import Slices
from tests.core.alignment.test_model_calls import CONFIG, Case, compare_with
from tests.harness.calls import ROWS, VOCAB, Form, run_step
from tests.harness.cases import check_cases
from tests.harness.contiguous import ContiguousTrainer, put_into

TOLD = Callbacks(slices=Slices.CONTIGUOUS)
CASES = {
    "packed": Case(Form()),
    "packed, logits": Case(Form(logits=True)),
    "packed, no mask, forward only": Case(Form(mask=False), forward_only=True),
    "rows": Case(ROWS),
    "rows, logits": Case(replace(ROWS, logits=True)),
}
ENDS = {
    "packed, data at the ends": Case(Form(where="ends")),
    "rows, data at the ends": Case(Form(packed=False, where="ends", sizes=(2, 2, 2))),
}
JOBS = {
    "CP2": (Layout(cp=2), CASES),
    "CP4": (Layout(cp=4), {name: CASES[name] for name in ("packed", "rows")}),
    "TP2 SP CP2": (Layout(tp=2, cp=2, sequence_parallel=True), {"packed": CASES["packed"]}),
    "CP2 PP2": (Layout(cp=2, pp=2), ENDS),
}


def built(layout: Layout) -> list[Any]:
    """Model chunks without rotary embeddings, in fp64."""
    spec = resolve("tiny-qwen3", num_layers=2, rope=False).with_vocab(VOCAB)
    return build_model(
        spec, layout=layout, dtype="float64", config_overrides={"variable_seq_lengths": True}
    )


def compare(case: Case, layout: Layout) -> None:
    """Ours against the stock schedule on the same calls of the same model."""
    chunks = built(layout)
    for chunk in chunks:
        put_into(chunk)
    compare_with(case, layout, chunks, ContiguousTrainer, TOLD)


@pytest.mark.parametrize("job", list(JOBS))
def test_contiguous_parts_are_read_and_answered(job: str) -> None:
    check_cases(*JOBS[job], compare)


def refuse(form: Form, layout: Layout) -> str:
    """What is wrong where Megatron's own attention gets contiguous parts; "" if that is said."""
    chunks, trainer = built(layout), ContiguousTrainer(form, 0, layout)
    with pytest.raises(CannotShare, match="contiguous parts of a call"):
        run_step(PrefixSchedule(CONFIG, TOLD), trainer, chunks)
    assert not trainer.order
    return ""


def test_attention_for_the_zig_zag_is_refused_before_anything_runs() -> None:
    check_cases(Layout(cp=2), {"packed": Form(), "rows": ROWS}, refuse)
