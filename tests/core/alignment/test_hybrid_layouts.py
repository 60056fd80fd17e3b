"""Hybrid models in layouts of several ranks, against Megatron's schedule in the same layout."""

from __future__ import annotations

import os
import traceback
from typing import Any

import megatron.core
import pytest
from packaging.version import Version

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli.matrix import align_row
from megatron_prefix.lab.data.rollouts import dense_vocabulary
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.lab.verify.matrix import MODELS, SHAPES, Row
from tests.harness.ranks import run_ranks
from tests.harness.rows import EVERYTHING, rows
from tests.harness.small_rows import small_rows  # noqa: F401
from tests.harness.stock_once import stock_once

pytestmark = pytest.mark.turns

ROWS = """
gdn/TP2+SP/tree/none
mamba/TP2+SP/chunked/full
gdn/PP2xVPP2/tree/full
mamba/PP2xCP2/tree/none
gdn-moe/PP2xEP2/chunked/none
hybrid-moe/EP2/tree/none
""".split()
LATER = {
    "mamba/PP2xVPP2/tree/none": "0.17",
    "hybrid-gdn/PP2xVPP2/chunked/full": "0.17",
    "hybrid-gdn/TP2+SP/tree/none": "0.17",
    "hybrid-gdn/CP2/tree/none": "0.18",
    "gdn/CP2/chunked/none": "0.18",
}
"""Rows, and the release of Megatron-Core that they begin with."""


PRODUCTS = ("mamba/PP2xCP2/tree/none", "gdn-moe/PP2xEP2/chunked/none")


@pytest.mark.parametrize("name", rows([*ROWS, *LATER], PRODUCTS))
def test_row(name: str) -> None:
    since = LATER.get(name, "0")
    if Version(megatron.core.__version__) < Version(since):
        pytest.skip(f"megatron-core {since} begins with it")
    verdict = align_row(Row(*name.split("/")), timeout_s=120)
    assert verdict.passed, verdict.failures
    assert verdict.grad_max_rel_diff <= verdict.tolerance < 1e-12
    assert verdict.loss_max_abs_diff < 1e-12 and verdict.logprob_max_abs_diff < 1e-12
    assert 0 < verdict.executed_tokens < verdict.raw_tokens


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


CONFIGS: dict[str, dict[str, Any]] = {
    "recompute": {"memory": "recompute", "chunk_tokens": 8},
    "offload": {"memory": "offload"},
    "auto": {"memory": "auto", "chunk_tokens": 16},
}
GATHERED: dict[str, dict[str, Any]] = {
    "gathered by wave": {"cp_reduce": "wave", "chunk_tokens": 8},
    "gathered by segment": {"cp_reduce": "segment", "memory": "recompute"},
}
"""With context parallelism, too: without it nothing is gathered."""


def configs_of(layout: Layout) -> dict[str, dict[str, Any]]:
    """Without products those of context parallelism alone, with which they are."""
    if layout.cp == 1:
        return CONFIGS
    return {**CONFIGS, **GATHERED} if EVERYTHING in os.environ else GATHERED


def _policies(model: str, layout: Layout, recompute: str) -> dict[str, Any]:
    """A rank's part: what went wrong with each configuration, "" for nothing."""
    runtime.initialize(layout)
    groups, vocab, _ = dense_vocabulary(SHAPES["tree"].groups(1, "float64"))
    spec = resolve(MODELS[model]).with_vocab(vocab)
    chunks = build_model(spec, layout=layout, dtype="float64", recompute=recompute)
    found = {}
    for name, fields in configs_of(layout).items():
        if layout.cp == 1 and name == "offload":
            fields = {**fields, "cache_host_layers": 9}
        config = PrefixConfig(segment_tokens=64, min_gain=0, kernel="math", **fields)
        try:
            mine = align.align(chunks, groups, config, multiple=layout.alignment)
            found[name] = "; ".join(align.over_ranks(mine).failures)
        except Exception:  # noqa: BLE001  # the case fails, and the next one tells its own story
            found[name] = traceback.format_exc()
    runtime.shutdown()
    return found


POLICIES = {
    "gdn PP2": ("gdn", Layout(pp=2), "selective"),
    "mamba PP2": ("mamba", Layout(pp=2), "none"),
    "mamba CP2": ("mamba", Layout(cp=2), "selective"),
}


@pytest.mark.parametrize("name", rows(POLICIES, ["mamba PP2"]))
def test_memory_policies(name: str) -> None:
    model, layout, recompute = POLICIES[name]
    for found in run_ranks(layout.world_size, stock_once()(_policies), model, layout, recompute):
        assert found == dict.fromkeys(configs_of(layout), "")
