"""Context-parallel ranks that hold contiguous parts of calls are refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_prefix.errors import CannotShare
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree.cp_layout import Slices
from tests.core.alignment.test_model_calls import CONFIG
from tests.harness.calls import ROWS, VOCAB, Form, run_step
from tests.harness.cases import check_cases
from tests.harness.contiguous import ContiguousTrainer

TOLD = Callbacks(slices=Slices.CONTIGUOUS)


def built(layout: Layout) -> list[Any]:
    """Model chunks without rotary embeddings, in fp64."""
    spec = resolve("tiny-qwen3", num_layers=2, rope=False).with_vocab(VOCAB)
    return build_model(
        spec, layout=layout, dtype="float64", config_overrides={"variable_seq_lengths": True}
    )


def refuse(form: Form, layout: Layout) -> str:
    """What is wrong with contiguous parts, which Megatron's attention is not for; "" if they are
    refused."""
    chunks, trainer = built(layout), ContiguousTrainer(form, 0, layout)
    with pytest.raises(CannotShare, match="contiguous parts of a call"):
        run_step(PrefixSchedule(CONFIG, TOLD), trainer, chunks)
    assert not trainer.order
    return ""


def test_contiguous_parts_are_refused_before_anything_runs() -> None:
    check_cases(Layout(cp=2), {"packed": Form(), "rows": ROWS}, refuse)
