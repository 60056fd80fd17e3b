"""The limit of memory in pipelines, virtual stages and with shared experts, on counted bytes; and
lengths of segments of ranks that share experts."""

import functools
import itertools
from typing import Any, NamedTuple
from unittest import mock

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
from megatron_prefix.plan import prediction, step_planner
from megatron_prefix.plan.step_planner import StepPlanner
from tests.harness import steps
from tests.harness.predicted import counted_step
from tests.harness.ranks import run_ranks
from tests.harness.trees import flat_rollouts

LAYOUTS = {"pp2 vpp2": Layout(pp=2, vpp=2), "ep2": Layout(dp=2, ep=2)}
FEW = {"num_moe_experts": 4}


class Counted(NamedTuple):
    """Of a step on one rank."""

    saved: float  # the most bytes that autograd and the sidecar hold
    limit: float  # bytes that the rank with most may take
    error: float
    """The largest difference of a gradient from the stock schedule's, over the largest gradient, in
    units of what the numerics policy allows."""
    report: Any


def against_stock(chunks, items, num_layers):
    """What the stock schedule saves in a step, and what counts steps of other schedules."""
    stock, wanted = counted_step(get_forward_backward_func(), chunks, items)
    num_tokens = sum(item["tokens"].numel() for item in items)
    allowed = tolerance(torch.float64, num_tokens, 256, num_layers)

    def counted(schedule):
        saved, gradients = counted_step(schedule, chunks, items)
        error = float((gradients - wanted).abs().max() / wanted.abs().max()) / allowed
        return Counted(saved, schedule.memory.limit, error, schedule.report)

    return stock, counted


GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}


def batches(number, order):
    """Of a data-parallel rank: three groups of four, two rollouts a microbatch; the second rank has
    shorter prompts and, where losses wait for one another, longer responses."""
    response = 112 if number and order == "in turn" else 32
    rollouts, _ = flat_rollouts(160 >> number, response, 4, 3)
    return steps.dealt(rollouts, 2, number if order == "shuffled" else None)


def counted(layout, order, configs):
    """A rank's part: what the stock schedule's step saves, bytes of weights and gradients, and by
    some configurations the steps, their plans, and why they fall back."""
    runtime.initialize(layout)
    prediction.LEAST_OVER = 0.0  # no bytes are too few to count
    name = "tiny-moe" if layout.ep > 1 else "tiny-llama"
    spec = resolve(name, num_layers=2 * layout.vpp, **FEW if layout.ep > 1 else {}).with_vocab(128)
    overrides = GLOBAL if order == "in turn" else {}
    chunks = build_model(spec, layout=layout, dtype="float64", config_overrides=overrides)
    items = batches(dist.get_rank() % layout.dp, order)  # data-parallel ranks are neighbours
    stock, count = against_stock(chunks, items, spec.num_layers)
    found = []
    for one in map(count, map(PrefixSchedule, configs)):
        plan, decision = one.report.plan, one.report.decision
        reason = "" if decision.share else decision.reason
        found.append((one._replace(report=None), f"{plan.programs} {plan.policies}", reason))
    static = sum(2 * p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())
    runtime.shutdown()
    return stock, static, found


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
        mine, plans, reasons = zip(*(rank[2][number] for rank in ranks), strict=True)
        saved, (limit,) = max(one.saved for one in mine), {one.limit for one in mine}
        assert len({*plans}) == 1 == len({*map(bool, reasons)})  # ranks decide alike
        assert max(one.error for one in mine) <= 1
        if config.memory_budget is None:
            # Attention on the CPU saves its scores as well in the stock schedule.
            assert limit <= 1.05 * stock + 0.05 * static
        if reasons[0]:
            assert "sharing would take" in reasons[0]
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


# Ranks that share experts choose one length of segments, by the rank that has most ----------------

COLLECTIVES = ("all_reduce", "all_gather_object", "broadcast", "all_gather_into_tensor")
MEMORY = (8, 64), (160, 8)
"""Prompts and responses of two ranks: the first alone would have a lower limit of memory."""


class Cut(NamedTuple):
    """How a rank has cut a step that it runs side by side with another."""

    requested_length: int  # of segments, that it would choose
    longest: int  # segment of several spans; a single one may exceed the length
    places: int  # segments side by side
    seconds: float  # predicted
    collectives: int  # that were made
    counted: Counted
    joined: bool  # whether prompts run with their suffixes


def counted_collectives():
    """How many are made from now on, in the one item."""
    made = [0]
    for name in COLLECTIVES:
        real = getattr(dist, name)

        def counting(*args, _real=real, **kwargs):
            made[0] += 1
            return _real(*args, **kwargs)

        setattr(dist, name, counting)  # in the rank's own process
    return made


def cut(layout, shapes, overrides=None, num_steps=4, **fields):
    """A rank's part of some equal steps; `overrides`: options of the model."""
    runtime.initialize(layout)
    prediction.LEAST_OVER, step_planner.LEAST_SEGMENT = 0.0, 16
    spec = resolve("tiny-moe", num_layers=2).with_vocab(128)
    chunks = build_model(spec, layout=layout, dtype="float64", config_overrides=overrides)
    rollouts, _ = flat_rollouts(*shapes[dist.get_rank() % layout.dp], 4, 4)  # of four groups
    _, count = against_stock(chunks, steps.dealt(rollouts, 2), 2)
    options = {"min_gain": 0, "segment_tokens": 256, **fields}
    schedule = PrefixSchedule(PrefixConfig(kernel="math", **options))
    made, found = counted_collectives(), []
    for _ in range(num_steps):
        made[0] = 0
        found.append(cut_of(count(schedule), made[0]))
    runtime.shutdown()
    return found


def cut_of(counted, collectives):
    """Of a step."""
    report = counted.report
    several = [s.padded_length for s in report.forest.segments if len(s.spans) > 1]
    return Cut(
        report.forest.requested_length, max(several), len(report.union_plan.segments),
        report.prediction.prefix_seconds, collectives, counted._replace(report=None),
        any(segment.joined >= 0 for segment in report.forest.segments),
    )  # fmt: skip


@pytest.mark.parametrize(("layout", "shapes"), [
    (Layout(dp=2, ep=2), ((160, 32), (80, 32))), (Layout(pp=2, dp=2, ep=2), MEMORY),
], ids=str)  # fmt: skip
def test_ranks_that_share_experts_cut_alike(layout, shapes):
    ranks = run_ranks(layout.world_size, cut, layout, shapes)
    by_step = [list(one) for one in zip(*ranks, strict=True)]
    for number, one in enumerate(by_step):
        assert max(rank.counted.error for rank in one) <= 1
        (limit,) = {rank.counted.limit for rank in one}
        assert max(rank.counted.saved for rank in one) <= 1.1 * limit, f"step {number}"
    assert len({rank.requested_length for rank in by_step[0]}) > 1, "alone they would differ"
    for before, one in itertools.pairwise(by_step):
        shortest = min(rank.requested_length for rank in before)
        assert max(rank.longest for rank in one) <= shortest
    first, second, third, fourth = (one[0] for one in by_step)
    assert third.places == fourth.places <= first.places
    assert second.collectives == third.collectives == fourth.collectives
    if shapes == MEMORY:  # the second rank's limit is both ranks', and no rank needs short ones
        assert {rank.requested_length for rank in by_step[-1]} == {256} or layout.pp > 1
        assert fourth.seconds < 0.9 * first.seconds


@pytest.mark.parametrize("long", [False, True])
def test_all_join_or_none(long):
    """A rank whose microbatches have no room for their prompts keeps the others from joining."""
    shapes = ((40, 10), (160, 10) if long else (40, 8))
    joining = functools.partial(cut, num_steps=2, min_gain=1, segment_tokens=100)
    ranks = run_ranks(2, joining, Layout(dp=2, ep=2), shapes)
    for step_of in zip(*ranks, strict=True):
        assert [one.joined for one in step_of] == [not long] * 2
        assert len({one.places for one in step_of}) == 1
        assert max(one.counted.error for one in step_of) <= 1


def test_ordered_steps_are_cut_with_prompts_apart():
    """The rounds that all ranks have are made of prompts, and of what follows them."""
    ordered = functools.partial(cut, overrides=GLOBAL, num_steps=2, min_gain=1, segment_tokens=100)
    ranks = run_ranks(2, ordered, Layout(dp=2, ep=2), ((40, 10), (40, 10)))
    for one in itertools.chain(*ranks):
        assert (one.joined, one.places) == (False, 4)
        assert one.counted.error <= 1


def failing():
    """What a step raises on a rank if it goes wrong on the second where prompts are put apart."""
    real = step_planner.StepPlanner.build_at

    def build_at(*args, **options):
        if dist.get_rank():
            raise KeyError("spoiled")
        return real(*args, **options)

    spoilt = mock.patch.object(step_planner.StepPlanner, "build_at", build_at)
    with spoilt, pytest.raises((StepFailed, KeyError)) as raised:
        cut(Layout(dp=2, ep=2), ((40, 10), (160, 10)), min_gain=1, segment_tokens=100)
    return str(raised.value)


def test_failing_to_put_prompts_apart_ends_the_step_of_all():
    first, second = run_ranks(2, failing, timeout_s=60.0)
    assert "rank 1: KeyError: 'spoiled'" in first
    assert second == "'spoiled'"
