"""Messages of whole plans between real ranks, without a model."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_prefix.lab import runtime
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run.execute.messages import Links, channels_of
from megatron_prefix.tree import Forest
from tests.harness.ranks import run_ranks
from tests.harness.trees import random_forest

CPU = torch.device("cpu")


def forest() -> Forest:
    """Three levels, uneven, the same on every rank."""
    return random_forest(random.Random(5))


def content(kind: str, segment: int, stage: int) -> float:
    """What the message of a segment that leaves a stage is filled with."""
    return 1000.0 * stage + segment + (0.5 if kind == "B" else 0.0)


def run_plan(num_chunks: int, backward: bool) -> int:
    """Follows this rank's program with messages only; returns how many arrived, all right."""
    world = runtime.initialize(runtime.Layout(pp=runtime.env_world_size() or 1))
    rank, size = world.rank, world.world_size
    plan = make_plan(forest(), size, num_chunks=num_chunks)
    found = channels_of(parallel_state.get_pipeline_model_parallel_group(), CPU)
    links = Links(found, plan, lambda index: (3, index + 1), torch.float64, CPU, backward)
    arrived, last = 0, plan.num_stages - 1
    for action in plan.programs[rank]:
        stage = plan.stage(rank, action.chunk)
        before, after = (0, last) if action.kind == "F" else (last, 0)
        travels = action.kind == "F" or backward
        links.advance()
        if stage != before and travels:
            source = stage + (-1 if action.kind == "F" else 1)
            message = links.receive(action)
            wanted = content(action.kind, action.segment, source)
            if message.shape != (3, action.segment + 1) or not bool((message == wanted).all()):
                raise AssertionError(f"{action} on stage {stage} got {message}, wanted {wanted}")
            arrived += 1
        if stage != after and travels:
            value = content(action.kind, action.segment, stage)
            links.send(action, torch.full((3, action.segment + 1), value, dtype=torch.float64))
        links.advance()
    links.finish()
    dist.barrier()
    return arrived


@pytest.mark.parametrize(
    ("num_ranks", "num_chunks", "backward"),
    [(2, 1, True), (2, 2, True), (3, 1, True), (3, 2, True), (4, 1, True), (2, 2, False)],
)
def test_every_message_of_a_plan_arrives_where_it_belongs(num_ranks, num_chunks, backward) -> None:
    arrived = run_ranks(num_ranks, run_plan, num_chunks, backward)
    num_segments = len(forest().segments)
    links = num_ranks * num_chunks - 1
    assert sum(arrived) == links * num_segments * (2 if backward else 1)
