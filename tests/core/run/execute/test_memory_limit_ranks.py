"""The limit of memory in pipelines, virtual stages and with shared experts, on counted bytes."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.device.tolerance import tolerance
from megatron_prefix.errors import StepFailed
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.plan import prediction
from megatron_prefix.plan.step_planner import StepPlanner
from tests.harness import steps
from tests.harness.predicted import counted_step
from tests.harness.ranks import run_ranks
from tests.harness.trees import flat_rollouts

LAYOUTS = {"pp2 vpp2": Layout(pp=2, vpp=2), "ep2": Layout(dp=2, ep=2)}
FEW = {"num_moe_experts": 4}


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


GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}


def batches(number, order):
    """Of a data-parallel rank: three groups of four, two rollouts a microbatch; the second rank has
    shorter prompts and, where losses wait for one another, longer responses."""
    response = 112 if number and order == "in turn" else 32
    rollouts, _ = flat_rollouts(160 >> number, response, 4, 3)
    return steps.dealt(rollouts, 2, number if order == "shuffled" else None)


def counted(layout, order, configs):
    """A rank's part: what the stock schedule's step saves, bytes of weights and gradients, and
    steps by some configurations."""
    runtime.initialize(layout)
    prediction.LEAST_OVER = 0.0  # no bytes are too few to count
    name = "tiny-moe" if layout.ep > 1 else "tiny-llama"
    spec = resolve(name, num_layers=2 * layout.vpp, **FEW if layout.ep > 1 else {}).with_vocab(128)
    overrides = GLOBAL if order == "in turn" else {}
    chunks = build_model(spec, layout=layout, dtype="float64", config_overrides=overrides)
    items = batches(dist.get_rank() % layout.dp, order)  # data-parallel ranks are neighbours
    stock, wanted = counted_step(get_forward_backward_func(), chunks, items)
    num_tokens = sum(item["tokens"].numel() for item in items)
    allowed = tolerance(torch.float64, num_tokens, 256, spec.num_layers)
    found = []
    for config in configs:
        schedule = PrefixSchedule(config)
        saved, gradients = counted_step(schedule, chunks, items)
        report = schedule.report
        error = float((gradients - wanted).abs().max() / wanted.abs().max()) / allowed
        plan = f"{report.plan.programs} {report.plan.policies}"
        reason = "" if report.decision.share else report.decision.reason
        found.append(Counted(saved, schedule.memory.limit, plan, reason, error))
    static = sum(2 * p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())
    runtime.shutdown()
    return stock, static, found


# tests/core/run/test_joint_lengths.py has stages that share experts.
@pytest.mark.parametrize(("layout", "order"), [("pp2 vpp2", "shuffled"), ("ep2", "in turn")])
def test_counted_bytes_keep_the_limit(layout, order):
    """Of the rank with most, whatever forwards are required; without room the step is stock's."""
    of = LAYOUTS[layout]
    options = dict(mode="auto", kernel="math", min_speedup=0.01, min_gain=0)
    options["across_ranks"] = "off"
    ways = [("auto", 0.0), ("auto", 3.5), ("retain", 1)]  # MiB a layer
    configs = [
        PrefixConfig(
            segment_tokens=96, memory=memory, memory_budget_gb=mib / 1024 * 2 * of.vpp, **options
        )
        for memory, mib in ways
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


def one_fails():
    """A rank's part of a step in which the last rank cannot make its segments: what it raises."""
    runtime.initialize(Layout(dp=2, ep=2))
    chunks = build_model(
        resolve("tiny-moe", num_layers=2).with_vocab(128), layout=Layout(dp=2, ep=2),
        dtype="float64", config_overrides=GLOBAL,
    )  # fmt: skip

    def spoiled(*_, **__):
        raise KeyError("spoiled")

    if dist.get_rank():
        StepPlanner.build = spoiled  # the rank's own process
    try:
        counted_step(PrefixSchedule(PrefixConfig(kernel="math")), chunks, batches(0, "in groups"))
    except (KeyError, StepFailed) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_cannot_cut_ends_the_step_of_all():
    other, failed = run_ranks(2, one_fails, timeout_s=60.0)
    assert failed == "KeyError: 'spoiled'"
    assert other == "StepFailed: the step ends on all ranks: rank 1: KeyError: 'spoiled'"
