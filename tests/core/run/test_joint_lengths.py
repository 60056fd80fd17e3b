"""Ranks that share experts choose one length of segments, by the rank that has most."""

import functools
import itertools
from typing import NamedTuple
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
from tests.core.run.execute.test_memory_limit_ranks import GLOBAL
from tests.harness import steps
from tests.harness.predicted import counted_step
from tests.harness.ranks import run_ranks
from tests.harness.trees import flat_rollouts

COLLECTIVES = ("all_reduce", "all_gather_object", "broadcast", "all_gather_into_tensor")

MEMORY = (8, 64), (160, 8)
"""Prompts and responses of two ranks: the first alone would have a lower limit of memory."""


class Cut(NamedTuple):
    """How a rank has cut a step that it runs side by side with another.

    Attributes:
        requested_length: of segments, that it would choose.
        longest: segment of several spans; a single one may exceed the length.
        places: segments side by side.
        seconds: predicted.
        collectives: that were made.
        saved: the most bytes that autograd and the sidecar hold.
        limit: bytes that the rank with most may take.
        error: the largest difference of a gradient from the stock schedule's, over the largest
            gradient, in units of what the numerics policy allows.
        joined: whether prompts run with their suffixes.
    """

    requested_length: int
    longest: int
    places: int
    seconds: float
    collectives: int
    saved: float
    limit: float
    error: float
    joined: bool


def batches(second, shapes):
    """Four groups of four, two rollouts a microbatch."""
    rollouts, _ = flat_rollouts(*shapes[second], 4, 4)
    return steps.dealt(rollouts, 2)


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
    items = batches(bool(dist.get_rank() % layout.dp), shapes)
    _, wanted = counted_step(get_forward_backward_func(), chunks, items)
    allowed = tolerance(torch.float64, sum(i["tokens"].numel() for i in items), 256, 2)
    options = {"min_gain": 0, "segment_tokens": 256, **fields}
    schedule = PrefixSchedule(PrefixConfig(kernel="math", **options))
    made, found = counted_collectives(), []
    for _ in range(num_steps):
        made[0] = 0
        saved, gradients = counted_step(schedule, chunks, items)
        error = float((gradients - wanted).abs().max() / wanted.abs().max()) / allowed
        report = schedule.report
        several = [s.padded_length for s in report.forest.segments if len(s.spans) > 1]
        found.append(
            Cut(
                report.forest.requested_length, max(several), len(report.union_plan.segments),
                report.prediction.prefix_seconds, made[0], saved, schedule.memory.limit, error,
                any(segment.joined >= 0 for segment in report.forest.segments),
            )
        )  # fmt: skip
    runtime.shutdown()
    return found


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [(Layout(dp=2, ep=2), ((160, 32), (80, 32))), (Layout(pp=2, dp=2, ep=2), MEMORY)],
    ids=str,
)
def test_ranks_that_share_experts_cut_alike(layout, shapes):
    ranks = run_ranks(layout.world_size, cut, layout, shapes)
    by_step = [list(one) for one in zip(*ranks, strict=True)]
    for number, one in enumerate(by_step):
        assert max(rank.error for rank in one) <= 1
        (limit,) = {rank.limit for rank in one}
        assert max(rank.saved for rank in one) <= 1.1 * limit, f"step {number}"
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
        assert max(one.error for one in step_of) <= 1


def test_ordered_steps_are_cut_with_prompts_apart():
    """The rounds that all ranks have are made of prompts, and of what follows them."""
    ordered = functools.partial(cut, overrides=GLOBAL, num_steps=2, min_gain=1, segment_tokens=100)
    ranks = run_ranks(2, ordered, Layout(dp=2, ep=2), ((40, 10), (40, 10)))
    for one in itertools.chain(*ranks):
        assert (one.joined, one.places) == (False, 4)
        assert one.error <= 1


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
