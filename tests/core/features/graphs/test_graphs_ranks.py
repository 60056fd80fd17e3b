"""Layers on CUDA graphs in layouts of several ranks, against the same steps without."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.graphs import layers
from megatron_prefix.features.graphs.part import graphs_of
from megatron_prefix.features.graphs.segment_graphs import SegmentGraphs
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import ModelSpec, resolve
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import hybrid
from tests.harness.ranks import run_ranks
from tests.harness.recorded import RecordedGraph, cores_in_fp64, recorded_graphs  # noqa: F401

pytestmark = pytest.mark.turns

HALVES = {"chunk_tokens": 12}
"""Of a prompt: recurrent states cross from one to the other."""
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "TP2+SP": (Layout(tp=2, sequence_parallel=True), {}),
    "TP2+SP, halves": (Layout(tp=2, sequence_parallel=True), HALVES),
    "CP2": (Layout(cp=2), {}),
    "PP2, halves": (Layout(pp=2), HALVES),
    "PP2 x VPP2, chunks": (Layout(pp=2, vpp=2), {"chunk_tokens": 8}),
    "DP2, overlapped, recomputed": (
        Layout(dp=2), {"chunk_tokens": 8, "memory": "recompute", "overlap_grad_reduce": True},
    ),
    "EP2, chunks": (Layout(dp=2, ep=2), {"chunk_tokens": 8}),
}  # fmt: skip
TOKENS, STEPS = 256, 2
WHEN = {"weights move": STEPS - 1, "a hook": 0}
MIXED = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.5,
         "moe_shared_expert_intermediate_size": 32}  # fmt: skip
HYBRID = {
    hybrid.GDN: resolve(hybrid.GDN, **hybrid.gated_delta(4)).with_vocab(64),
    hybrid.MAMBA: resolve(hybrid.MAMBA, **hybrid.mamba("M*-M")).with_vocab(64),
}
CONFIG = dict(kernel="math", min_gain=4, segment_tokens=24, memory="retain", graph_tokens=64)


def spec_of(name: str, layout: Layout) -> ModelSpec:
    """Of three layers, or two a stage or more; the first of experts is dense."""
    if name in HYBRID:
        return HYBRID[name]
    layers = 4 if layout.pp > 1 else 3
    fields = {**MIXED, "moe_layer_freq": (False, *(layers - 1) * (True,))} if name else {}
    return resolve(name or "tiny-llama", num_layers=layers, **fields).with_vocab(64)


def microbatches(layout: Layout, seed: int) -> list[Any]:
    seed += 100 * (layout.ep > 1) * align.data_rank()
    groups = list(generate(2, 24, 8, 3, vocab_size=64, seed=seed, uneven=layout.ep > 1))
    items = align.microbatches(groups, seed, align.alignment(spec_of("", layout), layout))
    return align.on_this_cp_rank(items)


def steps(
    layout: Layout, options: dict[str, Any], only_here: str = "", name: str = ""
) -> tuple[list[align.Trace], int]:
    """Traces of some steps on one rank, and how often its layers were captured.

    `only_here`: what happens on the first rank alone, before graphs are captured or after that;
    `name`: of the model.
    """
    runtime.initialize(layout, "cpu")
    options, build = dict(options), {}
    if "overlap_grad_reduce" in options:
        build["overlap_grad_reduce"] = options.pop("overlap_grad_reduce")
    chunks = build_model(spec_of(name, layout), layout=layout, dtype="float64", **build)
    schedule, found = PrefixSchedule(PrefixConfig(**CONFIG | options)), []
    for seed in range(STEPS):
        if seed == WHEN.get(only_here) and torch.distributed.get_rank() == 0:
            happen(only_here, unwrap(chunks[0]).decoder.layers[0].mlp.linear_fc1)
        items = microbatches(layout, seed)
        found.append(align.run_step(schedule, chunks, items, optimize=False))
    return found, sum(one.captures for one in map(graphs_of, chunks) if one is not None)


def happen(what: str, module: Any) -> None:
    if what == "weights move":
        module.weight.data = module.weight.data.clone()
    else:
        module.register_forward_hook(lambda *_: None)


ROWS = [
    *((name, "") for name in (
        "TP2+SP", "CP2", "PP2 x VPP2, chunks", "DP2, overlapped, recomputed")),
    # Also where ranks that share experts have segments of other lengths, and other graphs.
    ("TP2+SP", "tiny-moe"), ("CP2", "tiny-deepseek"), ("EP2, chunks", "tiny-moe"),
    ("TP2+SP, halves", hybrid.GDN), ("PP2, halves", hybrid.MAMBA),
]  # fmt: skip


@pytest.mark.parametrize(("name", "model"), ROWS)
def test_steps_are_those_without(
    name: str,
    model: str,
    recorded_graphs: type[RecordedGraph],  # noqa: F811
    request: pytest.FixtureRequest,
) -> None:
    if model in HYBRID:
        request.getfixturevalue("cores_in_fp64")
    ours = run_ranks(2, steps, *LAYOUTS[name], "", model)
    assert all(captures > 0 for _, captures in ours)
    compare(ours, name, model)


@pytest.mark.parametrize("what", WHEN)
def test_tensor_parallel_ranks_capture_together(
    what: str,
    recorded_graphs: type[RecordedGraph],  # noqa: F811
) -> None:
    ours = run_ranks(2, steps, *LAYOUTS["TP2+SP"], what, timeout_s=60.0)
    assert ours[0][1] == ours[1][1]
    compare(ours, "TP2+SP")


def _one_layer() -> int:
    layout = Layout(tp=2, sequence_parallel=True)
    runtime.initialize(layout, "cpu")
    spec = resolve("tiny-llama", num_layers=1).with_vocab(64)
    chunks = build_model(spec, layout=layout, dtype="float64")
    schedule = PrefixSchedule(PrefixConfig(**CONFIG))
    align.run_step(schedule, chunks, microbatches(layout, 0), optimize=False)
    graphs = graphs_of(chunks[0])
    assert graphs is not None
    return graphs.captures


@pytest.mark.usefixtures("recorded_graphs")
def test_the_last_stage_may_have_no_layer_with_graphs() -> None:
    """Of one layer, which runs on what is read."""
    assert run_ranks(2, _one_layer) == [0, 0]


@functools.cache
def without_graphs(name: str, model: str) -> list[tuple[list[align.Trace], int]]:
    """The same steps in a layout, where nothing is seen often enough to be captured."""
    with mock.patch.object(layers, "SEEN_BEFORE", 10**9):
        return run_ranks(2, steps, *LAYOUTS[name], "", model)


def compare(ours: list[tuple[list[align.Trace], int]], name: str, model: str = "") -> None:
    """Compares with the same steps without graphs."""
    limit = tolerance(torch.float64, TOKENS)
    for (mine, _), (others, none) in zip(ours, without_graphs(name, model), strict=True):
        assert none == 0
        for one, other in zip(mine, others, strict=True):
            assert all(torch.equal(one.auxiliary[key], of) for key, of in other.auxiliary.items())
            for key, gradient in other.gradients.items():
                difference = (one.gradients[key] - gradient).abs().max()
                assert difference <= limit * gradient.abs().max(), key


def _one_rank_fails(layout: Layout) -> tuple[list[str], int]:
    """Why each step has no graphs on this rank; on the second one captures fail."""
    runtime.initialize(layout, "cpu")
    if torch.distributed.get_rank() == 1:
        capture = SegmentGraphs.capture

        def failing(*arguments: Any) -> None:
            capture(*arguments)
            raise torch.OutOfMemoryError("no memory here")

        SegmentGraphs.capture = failing  # type: ignore[method-assign]
    chunks = build_model(spec_of("", layout), layout=layout, dtype="float64")
    schedule = PrefixSchedule(PrefixConfig(**CONFIG))
    found = []
    for seed in range(STEPS):
        align.run_step(schedule, chunks, microbatches(layout, seed), optimize=False)
        graphs = graphs_of(chunks[0])
        assert graphs is not None
        found.append(graphs.refused)
    return found, graphs.captures


@pytest.mark.usefixtures("recorded_graphs")
def test_where_one_rank_cannot_capture_none_has_graphs() -> None:
    """NCCL wants ranks to launch a collective alike; and none waits for another for ever."""
    [(first, captures), (second, more)] = run_ranks(2, _one_rank_fails, LAYOUTS["TP2+SP"][0])
    assert captures == more == 0
    assert "another tensor-parallel rank" in first[-1] and "no memory here" in second[-1]
