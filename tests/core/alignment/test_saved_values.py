"""What a wave saves of its values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.verify import align
from megatron_prefix.layers.blocks import core
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness.one_rank import one_rank, small_model


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize(
    ("name", "norms", "whole"),
    [
        ("tiny-llama", "local", False),
        ("tiny-qwen3", "local", True),
        ("tiny-qwen3", "transformer_engine", False),
    ],
)
def test_a_wave_holds_the_projection_only_where_norms_do(
    name: str, norms: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger: dict[bool, set[bool]] = {True: set(), False: set()}
    attention = core.segment_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, context: Any, *more: Any) -> Tensor:
        larger[context.inner].add(value.untyped_storage().nbytes() > value.nbytes)
        return attention(query, key, value, context, *more)

    monkeypatch.setattr(core, "segment_attention", watched)
    groups = list(generate(1, 9, 4, 3, vocab_size=64))
    schedule = PrefixSchedule(PrefixConfig(kernel="math", min_gain=0, segment_tokens=4))
    model = small_model(name)
    model.config.transformer_impl = norms
    align.run_step(schedule, [model], align.microbatches(groups, 0))
    assert larger[False] == {whole}
    assert larger[True] == {True}  # the sidecar copies them anyway
