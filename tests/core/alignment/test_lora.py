"""Adapters beside frozen linear layers: both schedules give them the same gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.measure.cost_meter import key_of
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models import build
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl import loss, passes
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.plan.cost import NUM_FEATURES
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import lora, steps
from tests.harness.ranks import run_ranks

VOCAB, LAYERS = 64, 2
CHUNKED = PrefixConfig(min_gain=0, chunk_tokens=16, segment_tokens=48)
ACROSS = replace(CHUNKED, across_ranks="on")


@dataclass(frozen=True)
class Case:
    """A layout, what is adapted, and how the schedule runs."""

    layout: Layout = Layout()  # noqa: RUF009  # frozen
    prefix: PrefixConfig = CHUNKED
    name: str = "tiny-llama"
    adapters: Mapping[str, Any] = field(default_factory=dict)
    build: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "one rank": Case(),
    "recomputed": Case(prefix=PrefixConfig(min_gain=0, memory="recompute")),
    "offloaded": Case(prefix=PrefixConfig(min_gain=0, memory="offload")),
    "Megatron's full recompute": Case(build={"recompute": "full"}),
    "experts": Case(name="tiny-moe"),
    "TP2": Case(Layout(tp=2)),
    "PP2": Case(Layout(pp=2)),
    "DP2, overlapped": Case(Layout(dp=2), build={"overlap_grad_reduce": True, "bucket_size": 1}),
    "the first layer's K and V frozen": Case(adapters={"targets": ("linear_fc2",)}),
    "the last layer alone": Case(adapters={"layers": (LAYERS - 1,)}),
    "the first layer alone": Case(adapters={"layers": (0,)}),
    "across ranks": Case(Layout(dp=2), ACROSS),
    "across ranks, the last layer alone": Case(
        Layout(dp=2), ACROSS, adapters={"layers": (LAYERS - 1,)}
    ),
    "across ranks, the first layer alone": Case(Layout(dp=2), ACROSS, adapters={"layers": (0,)}),
}


def groups_of(case: Case) -> list[Group]:
    """A data-parallel rank's, of its own; where prompts cross, its rollouts of all."""
    number = align.data_rank()
    if case.prefix.across_ranks != "on":
        return [*generate(2, 40, 16, 4, vocab_size=VOCAB, seed=number)]
    groups = generate(2, 40, 16, 4, vocab_size=VOCAB, seed=0)
    return [replace(one, rollouts=one.rollouts[number :: case.layout.dp]) for one in groups]


def compare(case: Case) -> None:
    make = build.build_chunk

    def adapted(recipe: Any, stage: int) -> Any:
        chunk = make(recipe, stage)
        lora.adapt(unwrap(chunk), **case.adapters)
        return chunk

    def on_rank() -> None:
        runtime.initialize(case.layout)
        spec = resolve(case.name, num_layers=LAYERS).with_vocab(VOCAB)
        # The reference keeps everything: with all layers recomputed, and an input without gradient
        # before them, Megatron's backward does not enter them, and adapters get zeros.
        keeping = {**case.build, "recompute": "none"}
        with mock.patch.object(build, "build_chunk", adapted):
            reference, chunks = (
                build_model(spec, layout=case.layout, dtype="float64", **options)
                for options in (keeping, case.build)
            )
        items = align.microbatches(groups_of(case), 1, case.layout.alignment)
        ours = PrefixSchedule(case.prefix)
        step = loss.forward_step(loss.GrpoConfig(clip_low=1.0, clip_high=1e9))
        stock = gradients(get_forward_backward_func(), step, reference, items)
        # Twice: what overlaps is only watched the first time.
        found = [gradients(ours, step, chunks, items) for _ in range(2)]
        terms = {name: float(gradient.abs().max()) for name, gradient in stock.items()}
        assert any(terms.values())
        for one in found:
            steps.assert_gradients(one, steps.Reference(stock, terms), 1000)
        (costs,) = ours.requests.costs.values()
        frozen = Rank.of(chunks).frozen_share
        assert 0.8 < frozen < 1 and "of the weights frozen" in key_of(Rank.of(chunks), "math")
        # A frozen weight has no gradient: its backward is one product, and not two.
        forward, backward = costs.times.prices[0], costs.times.prices[NUM_FEATURES // 2]
        assert backward == pytest.approx((2 - frozen) * forward, rel=0.05)  # the first rank's
        forest = ours.report.forest
        assert forest.executed_tokens < 0.6 * forest.raw_tokens

    run_ranks(case.layout.world_size, on_rank)


def gradients(
    schedule: Any, step: Any, chunks: Sequence[Any], items: Sequence[Any]
) -> dict[str, torch.Tensor]:
    """A step's gradients of the adapters; the base gets none."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    passes.run(schedule, step, list(chunks), items)
    found = {}
    for name, parameter in itertools.chain(*(unwrap(c).named_parameters() for c in chunks)):
        if ".linear_in." in name or ".linear_out." in name:
            found[name] = parameter.main_grad.detach().clone()
        else:
            assert not parameter.requires_grad and parameter.grad is None
            assert not hasattr(parameter, "main_grad")
    return found


@pytest.mark.parametrize("name", CASES)
def test_adapters_get_the_stock_schedules_gradients(name: str) -> None:
    compare(CASES[name])
