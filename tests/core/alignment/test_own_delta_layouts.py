"""slime's and miles' own GatedDeltaNet in layouts of several ranks, by stand-ins, on packs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.rollouts import dense_vocabulary
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.lab.verify.matrix import SHAPES
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import own_delta
from tests.harness.own_delta import FULL, LINEAR
from tests.harness.ranks import run_ranks
from tests.harness.rows import rows
from tests.harness.stock_once import stock_once

pytestmark = pytest.mark.turns

TYPES = (LINEAR, LINEAR, FULL)


def _aligned(layout: Layout, recompute: str, types: tuple[str, ...], net: str) -> list[str]:
    """A rank's part: what differs from the stock schedule, both on packs."""
    runtime.initialize(layout)
    groups, vocab, _ = dense_vocabulary(SHAPES["tree"].groups(2, "float64")[:2])
    spec = resolve("tiny-llama", num_layers=len(types)).with_vocab(vocab)
    with own_delta.own_layers(types, net, layout.sequence_parallel):
        chunks = build_model(spec, layout=layout, dtype="float64", recompute=recompute)
    found: list[str] = []
    made: list[PrefixSchedule] = []

    def remembered(*given: Any) -> PrefixSchedule:
        made.append(PrefixSchedule(*given))
        return made[-1]

    for fields in ({}, {"memory": "recompute", "chunk_tokens": 8}):
        config = PrefixConfig(segment_tokens=64, min_gain=0, kernel="math", **fields)  # type: ignore[arg-type]
        packed = Baseline("packed", pack_tokens=150)
        with mock.patch.object(align, "PrefixSchedule", remembered):
            mine = align.align(chunks, groups, config, multiple=layout.alignment, baseline=packed)
        everyone = align.over_ranks(mine)
        assert 1 < mine.microbatches < sum(len(group.rollouts) for group in groups)
        assert everyone.executed_tokens < everyone.raw_tokens
        assert everyone.grad_max_rel_diff <= everyone.tolerance < 1e-12
        found += everyone.failures
        report = made[-1].report
        assert report is not None and report.memory is not None
        if layout.pp == 1:  # else of the stage that takes most
            assert report.memory.cache_peak == pytest.approx(report.cache_bytes, rel=1e-6)
    runtime.shutdown()
    return found


CASES = {
    "TP2+SP": (Layout(tp=2, sequence_parallel=True), "none", "attribute"),
    "TP2+SP full": (Layout(tp=2, sequence_parallel=True), "full", "global"),
    "TP2": (Layout(tp=2), "none", "global"),
    "PP2": (Layout(pp=2), "none", "attribute"),
    "PP2 full": (Layout(pp=2), "full", "global"),
    "DP2": (Layout(dp=2), "none", "attribute"),
}


@pytest.mark.parametrize("name", rows(CASES, ["TP2+SP full", "PP2"]))
def test_ranks(name: str) -> None:
    layout, recompute, net = CASES[name]
    types = (*TYPES[:1], *TYPES) if layout.pp > 1 else TYPES[1:]
    for found in run_ranks(
        layout.world_size, stock_once()(_aligned), layout, recompute, types, net
    ):
        assert found == []
