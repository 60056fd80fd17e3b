"""A span and what continues it in one segment: rounds, what runs twice, where nothing is joined."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.features.mtp.tables import Division
from megatron_prefix.features.plan_files.segments import check_segments
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.step_planner import StepPlanner
from megatron_prefix.tree import Pairs, Place, Segment, Span, TreeOptions, build
from tests.harness.fuzzing import rounds
from tests.harness.trees import flat_rollouts, received, rollout_sets, tree_options

JOINS = TreeOptions(min_gain=4, segment_gain=32, segment_tokens=100, joins=True, share="batch")


def owners(num, each):
    """Microbatches of so many rollouts."""
    return [rollout // each for rollout in range(num)]


@given(rollout_sets(), tree_options(), st.integers(1, 4), st.sampled_from([0, 10, 1000]))
@settings(max_examples=rounds(40, 500))
def test_joined_forests_are_whole(sets, options, each, gain):
    rollouts, groups = sets
    owner = owners(len(rollouts), each)
    options = replace(options, joins=True, segment_gain=gain, chunk_tokens=0)
    apart = build(rollouts, groups, replace(options, joins=False), owner)
    forest = build(rollouts, groups, options, owner)
    check_whole(forest, rollouts, options)
    costs = [sum(one.padded_length + gain for one in made.segments) for made in (apart, forest)]
    assert costs[1] <= costs[0]
    joined = {segment.joined for segment in forest.segments} - {-1}
    if joined and not any(one.waits for one in forest.segments):  # a microbatch is in one segment
        where = [{place.segment for place in path} for path in forest.paths]
        for microbatch in set(owner):
            mine = [where[one] for one, other in enumerate(owner) if other == microbatch]
            assert len(set().union(*mine)) == 1


def check_whole(forest, rollouts, options):
    """Every rollout is there up to its end, once, and no joined segment is too long."""
    check_segments(forest.segments)
    assert received(forest) == forest
    for rollout, path in enumerate(forest.paths):
        spans = [forest.segments[index].spans[number] for index, number in path]
        assert [span.start for span in spans] == [0, *(span.end for span in spans)][:-1]
        assert spans[-1].end == len(rollouts[rollout])
        for span in spans:  # what is shared is the same
            first = rollouts[span.rollouts[0]]
            mine, theirs = (
                np.stack([one.inputs, one.labels])[:, span.start : span.end]
                for one in (rollouts[rollout], first)
            )
            assert np.array_equal(mine, theirs)
    for segment in forest.segments:
        index = segment.joined
        if index < 0:
            continue
        if options.segment_tokens:
            most = options.segment_tokens + options.segment_tokens // 8
            assert segment.padded_length <= -(-most // options.pad_multiple) * options.pad_multiple
        assert not any(index in other.parents for other in forest.segments)
        assert not segment.waits and segment.inner


def test_waves_that_join_are_whole():
    """Random trees below a prompt that stays apart: some rollouts end where others go on, and some
    are there several times, in several microbatches."""
    found = ends = copies = 0
    for seed in range(rounds(250, 2000)):
        rng = random.Random(seed)
        rollouts = random_rollouts(rng)
        owner = owners(len(rollouts), rng.randint(1, 6))
        options = replace(
            JOINS, min_gain=rng.choice((1, 4)), segment_gain=rng.choice((10, 50, 200)),
            segment_tokens=rng.choice((40, 60, 100, 300)), multiple=rng.choice((1, 1, 2)),
            pad_multiple=rng.choice((1, 8)), loss_in_leaves=rng.random() < 0.2,
        )  # fmt: skip
        forest = build(rollouts, None, options, owner)
        check_whole(forest, rollouts, options)
        apart = build(rollouts, None, replace(options, joins=False), owner)
        gain = options.segment_gain
        costs = [sum(one.padded_length + gain for one in made.segments) for made in (apart, forest)]
        assert costs[1] <= costs[0]
        below = [one for one in forest.segments if one.joined >= 0 and one.parents]
        found += bool(below)
        spans = [span for segment in below for span in segment.spans]
        read = {span.parent for span in spans}
        mine = {rollout for span in spans for rollout in span.rollouts}
        ends += any(forest.paths[rollout][-1] in read for rollout in mine)
        copies += any(len({owner[one] for one in span.rollouts}) > 1 for span in spans)
    assert min(found, ends, copies) > 5, (found, ends, copies)


def random_rollouts(rng):
    """Trees of up to four levels behind one to three prompts, all of the answers trained."""
    made = []

    def grow(before, depth):
        here = [*before, *(rng.randrange(10**6) for _ in range(rng.randint(1, 14)))]
        if not depth or rng.random() < 0.4:
            tokens = np.array(here)
            trained = np.arange(len(tokens) - 1) >= before.count(before[0]) - 1
            made.extend([Pairs(tokens[:-1], tokens[1:], trained)] * rng.choice((1, 1, 1, 2)))
        for _ in range(rng.randint(1, 3) if depth else 0):
            grow(here, depth - 1)

    for prompt in range(rng.randint(1, 3)):
        grow([-1 - prompt] * rng.randint(2, 60), rng.randint(1, 4))
    return made[:40]


def test_a_round_has_its_prompts():
    """Two groups of four rollouts of 20 + 5, a microbatch a group: each is a segment of 40."""
    forest = build(*flat_rollouts(20, 5, 4, 2), JOINS, owners(8, 4))
    assert [one.padded_length for one in forest.segments] == [80]
    tight = replace(JOINS, segment_tokens=40)
    forest = build(*flat_rollouts(20, 5, 4, 2), tight, owners(8, 4))
    assert [(one.padded_length, one.joined) for one in forest.segments] == [(40, 0), (40, 1)]
    assert [span.parent for span in forest.segments[1].spans] == [None, *[Place(1, 0)] * 4]
    assert forest.executed_tokens == 80


@pytest.mark.parametrize(("fields", "ranks"), [
    ({"min_gain": 0}, 1), ({"memory": "recompute"}, 1), ({"memory": "offload"}, 1),
    ({"chunk_tokens": 8}, 1), ({"cache_host_layers": 1}, 1), ({}, 2),
])  # fmt: skip
def test_where_nothing_is_joined(fields, ranks):
    cost = CostModel.of_flops(1.0, 1.0, 0.0)
    rollouts, _ = flat_rollouts(200, 50, 4, 2)
    planner = StepPlanner(PrefixConfig(**fields), cost, 1, ranks, 1, None, joins=True)
    _, forest = planner.build(rollouts, owners(8, 8))
    assert {one.joined for one in forest.segments} == {-1}
    planner = StepPlanner(PrefixConfig(), cost, 1, 1, 1, None, joins=True)
    _, forest = planner.build(rollouts, owners(8, 8))
    assert {one.joined for one in forest.segments} == {0}


def faults():
    root, leaf = Span(0, 4, 4, (0, 1)), Span(4, 2, 2, (0,), Place(0, 0))
    other = Span(4, 2, 2, (1,), Place(0, 0))
    return [
        (Segment((root, leaf, other), True, True, joined=0), ""),
        (Segment((leaf, root, other), True, True, joined=0), "is not a span of an inner segment"),
        (Segment((root, leaf, other), True, True), "has a rollout twice"),
        (Segment((root, leaf, other), False, True, joined=0), "is not a span of an inner segment"),
        (Segment((root, leaf, other), True, True, joined=3), "is joined as segment 3"),
        (Segment((root._replace(padded=5), leaf, other), True, True, joined=0), "has padding"),
        (Segment((root, leaf, leaf), True, True, joined=0), "rollout 0 comes from"),
    ]


@pytest.mark.parametrize(("segment", "fault"), faults())
def test_faults_of_joined_segments_are_named(segment, fault):
    if not fault:
        check_segments([segment])
        return
    with pytest.raises(UserError, match=fault):
        check_segments([segment])


@pytest.mark.parametrize(("division", "in_loss", "in_mean"), [
    (Division(False, False, False), [4.0, 0.5, 0.0], [4.0, 0.5, 0.0]),
    (Division(False, True, False), [1.0, 0.5, 1.0], [4.0, 0.5, 0.0]),
    (Division(False, True, True), [1.0, 0.5, 1.0], [1.0, 0.5, 1.0]),
    (Division(True, False, False), [1.0, 1.0, 1.0], [4.0, 0.5, 0.0]),
    (Division(True, True, False), [3.0, 1.5, 3.0], [4.0, 0.5, 0.0]),
    (Division(True, True, True), [3.0, 1.5, 3.0], [1.0, 0.5, 1.0]),
])  # fmt: skip
def test_what_a_weight_counts_in_predicting_further(division, in_loss, in_mean):
    """Of microbatches whose moved weights are less than 1 together, more, and none; releases of
    Megatron differ. Their steps are rows of tests/test_cases.py."""
    moved, unmoved = np.array([0.25, 2.0, 0.0]), np.array([3.0, 3.0, 3.0])
    assert division.in_loss(moved, unmoved).tolist() == in_loss
    assert division.in_mean(moved).tolist() == in_mean
