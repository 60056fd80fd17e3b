"""The limit of memory in pipelines, virtual stages and with shared experts, on counted bytes."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.config import PrefixConfig
from megatron_prefix.device.tolerance import tolerance
from megatron_prefix.lab import runtime
from megatron_prefix.lab.bench.counted import SavedBytes
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.offload.segment import addresses
from megatron_prefix.plan import stock_plan
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract
from tests.harness.trees import flat_rollouts

LAYOUTS = {
    "pp2": Layout(pp=2),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "ep2": Layout(dp=2, ep=2),
    "pp2 ep2": Layout(pp=2, dp=2, ep=2),
}


class Counted(NamedTuple):
    """Of a step on one rank.

    Attributes:
        saved: the most bytes that autograd and the sidecar hold.
        limit: bytes that the rank with most may take.
        plan: programs and policies.
        reason: of a fallback; empty where the step shares.
        error: the largest difference of a gradient from the stock schedule's, over the largest
            gradient, in units of what the numerics policy allows.
    """

    saved: float
    limit: float
    plan: str
    reason: str
    error: float


def batches(number: int, prompt: int, order: str) -> list[Any]:
    """Of a data-parallel rank: six groups of four, two rollouts a microbatch; later ranks have
    shorter rollouts."""
    rollouts, _ = flat_rollouts(prompt >> number, 32, 4, 6)
    places = list(range(len(rollouts)))
    if order == "shuffled":
        random.Random(number).shuffle(places)
    return [
        steps.microbatch([rollouts[place] for place in places[start : start + 2]], 0, start)
        for start in range(0, len(places), 2)
    ]


def step(schedule: Any, chunks: list[Any], items: list[Any]) -> tuple[float, torch.Tensor]:
    """The most bytes that autograd and the sidecar hold in a step, and its gradients."""
    count = SavedBytes(
        addresses(*(t for c in chunks for t in (*unwrap(c).parameters(), *unwrap(c).buffers())))
    )
    for chunk in chunks:
        steps.zero_gradients(chunk)
    with count.counting():
        schedule(
            forward_step_func=Contract().step, num_microbatches=len(items), forward_only=False,
            data_iterator=[iter(items) for _ in chunks] if len(chunks) > 1 else iter(items),
            model=chunks if len(chunks) > 1 else chunks[0],
            seq_length=items[0]["tokens"].shape[1], micro_batch_size=2,
        )  # fmt: skip
    cache = schedule.report.cache_bytes if isinstance(schedule, PrefixSchedule) else 0
    gradients = [p.main_grad.flatten() for chunk in chunks for p in chunk.parameters()]
    return count.peak + cache, torch.cat(gradients)


def counted(
    layout: Layout, order: str, configs: list[PrefixConfig]
) -> tuple[float, float, list[Counted]]:
    """A rank's part: what the stock schedule's step saves, bytes of weights and gradients, and
    steps by some configurations."""
    runtime.initialize(layout)
    stock_plan.LEAST_OVER = 0.0  # no bytes are too few to count
    name = "tiny-moe" if layout.ep > 1 else "tiny-llama"
    spec = resolve(name, num_layers=4).with_vocab(128)
    chunks = build_model(spec, layout=layout, dtype="float64")
    items = batches(dist.get_rank() % layout.dp, 160, order)  # data-parallel ranks are neighbours
    stock, wanted = step(get_forward_backward_func(), chunks, items)
    allowed = tolerance(torch.float64, sum(i["tokens"].numel() for i in items), 256, 4)
    found = []
    for config in configs:
        schedule = PrefixSchedule(config)
        saved, gradients = step(schedule, chunks, items)
        report: Any = schedule.report
        error = float((gradients - wanted).abs().max() / wanted.abs().max()) / allowed
        plan = f"{report.plan.programs} {report.plan.policies}"
        reason = "" if report.decision.share else report.decision.reason
        found.append(Counted(saved, schedule.memory.limit, plan, reason, error))
    static = sum(2 * p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())
    runtime.shutdown()
    return stock, static, found


@pytest.mark.parametrize("order", ["in groups", "shuffled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_counted_bytes_keep_the_limit(layout: str, order: str) -> None:
    """Of the rank with most, whatever forwards are required; without room the step is stock's."""
    of = LAYOUTS[layout]
    options: dict[str, Any] = dict(mode="auto", kernel="math", min_speedup=0.01, min_gain=0)
    options["across_ranks"] = "off"
    configs = [PrefixConfig(segment_tokens=tokens, **options) for tokens in (512, 96)]
    configs += [
        PrefixConfig(segment_tokens=96, memory=memory, memory_budget_gb=mib / 1024, **options)
        for memory, mib in itertools.product(("auto", "retain"), (12, 5))
    ]
    ranks = run_ranks(of.world_size, counted, of, order, configs)
    stock, static = (max(rank[number] for rank in ranks) for number in (0, 1))
    shared = 0
    for number, config in enumerate(configs):
        mine = [rank[2][number] for rank in ranks]
        saved, (limit,) = max(one.saved for one in mine), {one.limit for one in mine}
        assert len({(one.plan, bool(one.reason)) for one in mine}) == 1  # ranks decide alike
        assert max(one.error for one in mine) <= 1
        if config.memory_budget is None:
            # Attention on the CPU saves its scores as well in the stock schedule.
            assert limit <= 1.05 * stock + 0.05 * static
        if mine[0].reason:
            assert "sharing would take" in mine[0].reason
            continue
        assert saved <= 1.1 * limit, f"{config}"  # as exact as the model of memory is
        shared += 1
    assert 2 <= shared < len(configs)
