"""Messages of whole plans between real ranks, without a model."""

import itertools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from megatron.core import parallel_state

from megatron_prefix.lab import runtime
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.execute.messages import Links, channels_of, colour
from megatron_prefix.tree import Pairs, TreeOptions, build
from tests.harness.ranks import run_ranks
from tests.harness.trees import random_forest, rollout_sets, tree_options

CPU = torch.device("cpu")


def forest():
    """Three levels, uneven, the same on every rank."""
    return random_forest(random.Random(5))


def content(kind, segment, stage):
    """What the message of a segment that leaves a stage is filled with."""
    return 1000.0 * stage + segment + (0.5 if kind == "B" else 0.0)


def run_plan(num_chunks, backward):
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
    ("num_ranks", "num_chunks", "backward"), [(2, 1, True), (3, 2, True), (2, 2, False)]
)
def test_every_message_of_a_plan_arrives_where_it_belongs(num_ranks, num_chunks, backward):
    arrived = run_ranks(num_ranks, run_plan, num_chunks, backward)
    num_segments = len(forest().segments)
    links = num_ranks * num_chunks - 1
    assert sum(arrived) == links * num_segments * (2 if backward else 1)


# Which ranks may share a process group ------------------------------------------------------------


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("step", [1, -1])
def test_no_rank_has_two_links_in_one_process_group(size, step):
    links = [(sender, (sender + step) % size) for sender in range(size)]
    for one, other in itertools.combinations(links, 2):
        if colour(one[0], size) == colour(other[0], size):
            assert not {*one} & {*other}
    assert {colour(sender, size) for sender in range(size)} == set(range(2 + size % 2))


@given(sets=rollout_sets(), options=tree_options())
def test_every_segment_reads_its_rollouts(sets, options):
    """The rows on a rollout's path are the rollout, at its own positions."""
    rollouts, groups = sets
    forest = build(rollouts, groups, options)
    inputs = SegmentInputs(forest, rollouts, CPU)
    for rollout, path in zip(rollouts, forest.paths, strict=True):
        parts = []
        for index, position in path:
            rows = forest.segments[index].spans
            start = sum(span.padded for span in rows[:position])
            parts.append(inputs[index][:, start : start + rows[position].length])
        tokens, labels, positions = torch.cat(parts, 1).tolist()
        assert tokens == rollout.inputs.tolist()
        assert labels == rollout.labels.tolist()
        assert positions == list(range(len(rollout)))
    for index, segment in enumerate(forest.segments):
        assert inputs[index].shape == (3, segment.padded_length)
        assert inputs[index].dtype == torch.int64
    highest = [span.start + span.padded for segment in forest.segments for span in segment.spans]
    assert inputs.max_position == max(highest) - 1


def test_padding_has_legal_tokens_and_goes_on_counting():
    rollouts = [Pairs(np.array([5, 6, 7]), np.array([6, 7, 8]), np.ones(3, bool))] * 2
    rollouts[1] = Pairs(np.array([5]), np.array([9]), np.ones(1, bool))
    forest = build(rollouts, None, TreeOptions(multiple=4, min_gain=0))
    inputs = SegmentInputs(forest, rollouts, CPU)
    assert inputs[0].tolist() == [
        [5, 6, 7, 0, 5, 0, 0, 0], [6, 7, 8, 0, 9, 0, 0, 0], [0, 1, 2, 3, 0, 1, 2, 3],
    ]  # fmt: skip
