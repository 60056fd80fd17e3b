"""Layers on CUDA graphs, whose launches are noted and launched again on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.install import installed
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness.one_rank import one_rank, small_model
from tests.harness.recorded import RecordedGraph, recorded_graphs  # noqa: F401

TOKENS = 256


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def steps(model: Any, config: PrefixConfig, num: int, **shape: Any) -> list[align.Trace]:
    """Traces of some steps of other tokens, without an optimizer."""
    schedule = PrefixSchedule(config)
    found = []
    for seed in range(num):
        groups = list(generate(2, 24, 9, 4, vocab_size=64, seed=seed, **shape))
        items = align.microbatches(groups, seed)
        found.append(align.run_step(schedule, [model], items, optimize=False))
    assert schedule.report is not None and schedule.report.decision.share
    return found


def same(ours: align.Trace, other: align.Trace) -> None:
    """Torch's norms read their input twice, so that gradients are added in another order."""
    assert torch.equal(ours.logprobs, other.logprobs)
    limit = tolerance(torch.float64, TOKENS)
    for name, gradient in other.gradients.items():
        difference = (ours.gradients[name] - gradient).abs().max()
        assert difference <= limit * gradient.abs().max(), name


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-gpt-oss"])
@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 8}])
def test_steps_are_those_without(
    name: str, options: dict[str, int], recorded_graphs: type[RecordedGraph]  # noqa: F811
) -> None:
    spec = {"num_layers": 3} | ({"num_moe_experts": None} if name == "tiny-gpt-oss" else {})
    config = dict(kernel="math", min_gain=4, segment_tokens=24, memory="retain", **options)
    plain, graphed = (small_model(name, spec=spec) for _ in range(2))
    # Padding alone changes how positions are summed up: it is the same on both sides.
    for_both = PrefixConfig(**config, graph_tokens=48)
    ours = steps(graphed, for_both, 3, uneven=True)
    hooks = installed(graphed)
    assert hooks is not None and hooks.graphs is not None and not hooks.graphs.refused
    assert recorded_graphs.replays > 0
    others = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_prefix.layers.graphs.layers._BEFORE", 10**9)
        others = steps(plain, for_both, 3, uneven=True)
    for one, other in zip(ours, others, strict=True):
        same(one, other)
