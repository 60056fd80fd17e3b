"""DeepSeek's sparse attention on several ranks, against the stock schedule in the same layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from megatron.core import parallel_state

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from tests.harness import sparse
from tests.harness.context_parallel import DATA, VOCAB
from tests.harness.ranks import run_ranks
from tests.harness.rows import rows
from tests.harness.stock_once import stock_once

pytestmark = pytest.mark.turns

LAYOUTS: dict[str, tuple[Layout, dict[str, Any], dict[str, Any]]] = {
    "tp2 sp": (Layout(tp=2, sequence_parallel=True), {}, {}),
    "pp2": (Layout(pp=2), {}, {}),
    "pp2 vpp2": (Layout(pp=2, vpp=2), {}, {"num_layers": 4}),
    "dp2": (Layout(dp=2), {}, {}),
    "dp2 ep2": (Layout(dp=2, ep=2), {}, {"num_moe_experts": 8}),
    "prompts cross ranks": (Layout(dp=2), {"across_ranks": "on"}, {}),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("flat", {"segment_tokens": 48}),
    ("tree", {"memory": "recompute", "chunk_tokens": 8}),
]


def verdicts(layout: Layout, more: dict[str, Any], fields: Any) -> list[align.Alignment]:
    """One rank's part of all cases of a layout."""
    runtime.initialize(layout)
    spec = resolve("tiny-deepseek", **{**sparse.DENSE, "num_layers": 2, **fields})
    found = []
    with sparse.rotating():
        chunks = build_model(
            spec.with_vocab(VOCAB), layout=layout, dtype="float64", config_overrides=sparse.DSA
        )
        rank = parallel_state.get_data_parallel_rank()
        for name, options in CASES:
            mine = DATA[name][rank :: layout.dp]
            if more:  # every rank has rollouts of every group
                mine = [
                    dataclasses.replace(group, rollouts=group.rollouts[rank :: layout.dp])
                    for group in DATA[name]
                ]
            config = PrefixConfig(min_gain=0, **options, **more)
            verdict = align.align(chunks, mine, config, multiple=layout.alignment)
            found.append(align.over_ranks(verdict))
    return found


@pytest.mark.parametrize("layout", rows(LAYOUTS, ["pp2", "dp2"]))
def test_as_the_stock_schedule_in_the_same_layout(layout: str) -> None:
    where, *more = LAYOUTS[layout]
    for found in run_ranks(where.world_size, stock_once()(verdicts), where, *more):
        for case, verdict in zip(CASES, found, strict=True):
            assert verdict.passed, (case, verdict.failures)
            assert verdict.executed_tokens < verdict.raw_tokens
            assert (verdict.received_tokens > 0) == (layout == "prompts cross ranks")
