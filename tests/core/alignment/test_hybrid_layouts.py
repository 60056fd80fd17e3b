"""Hybrid models in layouts of several ranks, against Megatron's schedule in the same layout."""

from __future__ import annotations

import megatron.core
import pytest
from packaging.version import Version

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.rollouts import dense_vocabulary
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.lab.verify.matrix import MODELS, SHAPES
from tests.harness.ranks import run_ranks
from tests.harness.small_rows import small_rows  # noqa: F401

pytestmark = pytest.mark.turns


def _packed(model: str, layout: Layout) -> list[str]:
    """A rank's part: what differs from the stock schedule, both on packs."""
    runtime.initialize(layout)
    groups, vocab, _ = dense_vocabulary(SHAPES["tree"].groups(2, "float64")[:2])
    chunks = build_model(resolve(MODELS[model]).with_vocab(vocab), layout=layout, dtype="float64")
    config = PrefixConfig(segment_tokens=64, min_gain=0, kernel="math")
    packs = Baseline("packed", pack_tokens=150)
    mine = align.align(chunks, groups, config, multiple=layout.alignment, baseline=packs)
    everyone = align.over_ranks(mine)
    runtime.shutdown()
    assert 1 < mine.microbatches < sum(len(group.rollouts) for group in groups)
    assert everyone.executed_tokens < everyone.raw_tokens
    return list(everyone.failures)


@pytest.mark.skipif(
    Version(megatron.core.__version__) < Version("0.18"),
    reason="megatron-core 0.18 begins to pack microbatches of GatedDeltaNet",
)
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(cp=2)],
    ids=["one rank", "TP2+SP", "PP2", "CP2"],
)
def test_packs_of_gated_delta_net(layout: Layout) -> None:
    for found in run_ranks(layout.world_size, _packed, "gdn", layout):
        assert found == []
