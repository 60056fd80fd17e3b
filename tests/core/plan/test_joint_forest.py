"""Pipelines side by side: one plan for all. That jobs of them end: tests/lab/plans/test_job.py."""

from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.plan_files.segments import check_segments
from megatron_prefix.features.plan_files.table import from_csv, to_csv
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.joint_forest import JointForest, joint_forest
from megatron_prefix.plan.planner import best_plan, loss_ready_after, make_plan
from megatron_prefix.plan.prediction import Prediction
from megatron_prefix.plan.step_planner import Forecast, StepPlanner, segment_lengths
from megatron_prefix.run.execute.memory_control import longest_segments
from megatron_prefix.tree import Place, Span, TreeOptions, build
from tests.harness.fuzzing import rounds
from tests.harness.trees import flat_rollouts, random_forest, received


def some(rng, num):
    """Forests, one of them joined or without a rollout now and then, and microbatches of some
    rollouts."""
    forests = [
        random_forest(rng, joined=rng.random() < 0.4) if rng.random() < 0.9 else build([])
        for _ in range(num)
    ]
    microbatches_of = []
    for forest in forests:
        microbatch_of = [number // rng.randint(1, 3) for number in range(len(forest.num_positions))]
        microbatches_of.append([sorted(set(microbatch_of)).index(one) for one in microbatch_of])
    return forests, microbatches_of


def all_of(forests, microbatches_of):
    return [joint_forest(forests, microbatches_of, place) for place in range(len(forests))]


def renumbered(segment, new):
    """The segment with other numbers of its parents' segments."""
    spans = [
        span._replace(parent=span.parent and Place(new[span.parent.segment], span.parent.number))
        for span in segment.spans
    ]
    joined = -1 if segment.joined < 0 else new[segment.joined]
    return segment._replace(spans=tuple(spans), joined=joined)


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
@settings(max_examples=rounds(30, 500))
def test_a_plan_of_the_union_is_one_for_all(rng, num, num_ranks, num_chunks):
    num_chunks = num_chunks if num_ranks > 1 else 1
    forests, microbatches_of = some(rng, num)
    found = all_of(forests, microbatches_of)
    assert all(each.union == found[0].union for each in found)
    ready_after = [loss_ready_after(each.forest, each.microbatch_of) for each in found]
    for make in (make_plan, best_plan):
        union, microbatches = found[0].union, found[0].union_microbatch_of
        joint = make(union, num_ranks, num_chunks=num_chunks, microbatches=microbatches)
        simulate(joint, ready_after=loss_ready_after(union, microbatches))  # what any waits for
        plans = [Plan(each.forest.segments, joint.programs, num_chunks) for each in found]
        for plan, needs in zip(plans, ready_after, strict=True):
            simulate(plan, ready_after=needs)
            check_segments(plan.segments)
            assert not plan.segments or from_csv(to_csv(plan)) == plan


@given(st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=rounds(30, 500))
def test_every_forest_is_in_the_union_and_fillers_are_padding(rng, num):
    forests, microbatches_of = some(rng, num)
    every = zip(forests, microbatches_of, all_of(forests, microbatches_of), strict=True)
    for forest, microbatch_of, found in every:
        filled = found.forest
        real = [index for index, s in enumerate(filled.segments) if s.spans[0].rollouts]
        own = dict(zip(real, range(len(real)), strict=True))
        kept = (filled.segments[index] for index in real)
        assert tuple(renumbered(segment, own) for segment in kept) == forest.segments
        assert filled.executed_tokens == forest.executed_tokens
        assert found.microbatch_of == tuple(microbatch_of)
        for index, segment in enumerate(filled.segments):
            if index not in real:
                assert segment.padded_length == forest.multiple and not segment.parents
                assert not (segment.inner or segment.scored)
        assert received(filled) == filled
    assert found.union.raw_tokens == sum(forest.raw_tokens for forest in forests)
    assert found.union.executed_tokens == sum(forest.executed_tokens for forest in forests)
    most = max(len(forest.segments) for forest in forests)
    assert len(found.union.segments) >= most
    if num == 1:
        assert found.union == forests[0] == found.forest


@pytest.mark.parametrize("place", [0, 1])
def test_ranks_that_gather_tokens_have_segments_of_one_length(place):
    """Padding belongs to no rollout, and is behind what is computed."""
    forests = [build(*flat_rollouts(64, length, 4, 2)) for length in (4092, 4096)]
    found = joint_forest(forests, [range(8)] * 2, place, even=True)
    own = [segment.padded_length for segment in found.forest.segments]
    assert own == [positions for positions, _ in found.most]
    for padded, segment in zip(found.forest.segments, forests[place].segments, strict=True):
        spans = len(segment.spans)
        assert padded.spans[:spans] == segment.spans
        assert all(not one.length and not one.rollouts for one in padded.spans[spans:])
    assert found.forest.executed_tokens == forests[place].executed_tokens


def test_joined_segments_run_beside_joined_ones():
    """Nobody waits for either; beside prompts that run apart they are told to be mixed."""
    owners = [number // 2 for number in range(8)]
    rollouts, groups = flat_rollouts(40, 20, 4, 2)
    options = TreeOptions(min_gain=1, segment_gain=500, segment_tokens=150, share="batch")
    apart, joined = (
        build(rollouts, groups, replace(options, joins=joins), owners) for joins in (False, True)
    )
    assert [segment.joined for segment in joined.segments] == [0, 1]
    found = joint_forest([joined, joined], [owners] * 2)
    assert found.forest == joined and not found.mixed
    assert [segment.joined for segment in found.union.segments] == [0, 1]
    assert [s.joined for s in longest_segments(found)] == [0, 1]
    assert not joint_forest([apart, apart], [owners] * 2).mixed
    assert joint_forest([joined, apart], [owners] * 2).mixed
    waves = replace(apart, segments=tuple(_as_joined(apart.segments)))
    found = joint_forest([waves, apart], [owners] * 2)
    assert not found.mixed  # prompts wait on both
    assert [s.joined for s in found.union.segments] == [s.joined for s in waves.segments]


def _as_joined(segments):
    """Each wave as one whose last span continues its first."""
    for index, segment in enumerate(segments):
        if segment.inner:
            yield segment
            continue
        first, *_, last = segment.spans
        below = Span(first.end, 1, 1, first.rollouts, Place(index, 0))
        yield segment._replace(spans=(first, last, below), inner=True, joined=index)


# `segment_tokens` "auto": the fastest length that fits --------------------------------------------

COST = CostModel.of_flops(1.0, 1.0, 0.0)
ROLLOUTS, _ = flat_rollouts(100, 900, 4, 20)
OWNERS = list(range(len(ROLLOUTS)))


def forecast(plan, over, seconds, *, retains):
    """Of a plan that is over its limit by so much, and takes so long."""
    none = np.zeros(0)
    return Forecast(plan, plan, over, 0.0, Prediction(none, none, 0.0, seconds), retains)


def chosen(room, per_action, given="auto", most=None):
    """The longest segment, where at most `room` positions fit and an action costs so much."""
    planner = StepPlanner(PrefixConfig(segment_tokens=given), COST, 1, 1, 1, None)

    def judge(_, plan):
        longest = max(segment.padded_length for segment in plan.segments)
        seconds = sum(s.padded_length + per_action for s in plan.segments)
        return forecast(plan, max(0, longest - room), seconds, retains=True)

    _, forest = planner.build(ROLLOUTS, OWNERS, judge, most=most)
    return max(segment.padded_length for segment in forest.segments)


def test_the_longest_that_fits_where_actions_cost():
    assert 8192 < chosen(room=20000, per_action=500.0) <= 16384
    assert 2048 < chosen(room=5000, per_action=500.0) <= 4096


@pytest.mark.parametrize("given", [8192, "auto"])
def test_none_is_longer_than_the_most(given):
    assert 2048 < chosen(room=20000, per_action=500.0, given=given, most=3000) <= 3000


def test_a_given_length_is_halved_only_to_keep_the_limit():
    assert 4096 < chosen(room=8192, per_action=-2000.0, given=8192) <= 8192
    assert 2048 < chosen(room=5000, per_action=500.0, given=8192) <= 4096
    assert 512 < chosen(room=10, per_action=500.0, given=8192) <= 1024
    assert 1024 < chosen(room=10, per_action=500.0, given=1900) <= 1900


def predicted(seconds, _, plan):
    return forecast(plan, 0.0, seconds, retains=True)


def test_what_a_search_chose_serves_for_steps_alike():
    planner, tries = StepPlanner(PrefixConfig(segment_tokens="auto"), COST, 1, 1, 1, None), []
    for seconds in (1.0, 1.05, 1.2, 1.2):
        judge = Mock(side_effect=partial(predicted, seconds))
        planner.build(ROLLOUTS, OWNERS, judge)
        tries.append(judge.call_count)
    assert tries == [5, 1, 6, 1]


@pytest.mark.parametrize(("even", "saves", "over", "stays"), [
    (4096, 0.14, 0.0, True), (4096, 0.16, 0.0, False), (0, 0.14, 0.0, False),
    (4096, 0.14, 1.0, False),
])  # fmt: skip
def test_lengths_that_are_to_come_again_stay(even, saves, over, stays):
    """Unless others save much, or they no longer keep the limit."""
    planner = StepPlanner(PrefixConfig(), COST, 1, 1, 1, None, even=even)

    def longest(slower, faster, over=0.0):
        def judge(_, plan):
            is_long = max(segment.padded_length for segment in plan.segments) > 4096
            return forecast(plan, over * is_long, slower if is_long else faster, retains=False)

        return planner.build(ROLLOUTS, OWNERS, judge)[0]

    first = longest(1.0, 2.0)
    assert first > 4096
    assert (longest(3.0, 3.0 * (1 - saves), over) == first) is stays


def test_how_far_stages_run_ahead_serves_for_steps_alike():
    """Where segments are recomputed, while the limit is kept."""
    planner, tries = StepPlanner(PrefixConfig(), COST, 1, 4, 1, None), []
    joint = JointForest.alone(planner.build(ROLLOUTS, OWNERS)[1], OWNERS)
    waits = dict(zip(planner.plans(joint), (2, 3, 1, 2), strict=True))

    def waiting(seconds, over, _, plan):
        return forecast(plan, over, seconds * waits[plan], retains=False)

    for step in ((1.0, 0.0), (1.05, 0.0), (1.05, 1.0), (1.2, 0.0)):
        judge = Mock(side_effect=partial(waiting, *step))
        assert waits[planner.fitting(joint, judge).plan] == 1
        tries.append(judge.call_count)
    assert tries == [4, 2, 5, 4]


def test_stages_run_less_ahead_before_segments_are_cut():
    """Where that is faster; here only segments cost time."""
    planner = StepPlanner(PrefixConfig(), COST, 1, 4, 1, None)

    def judge(_, plan):
        over = max(0.0, max(plan.peak_positions) - 40000)
        return forecast(plan, over, float(len(plan.segments)), retains=True)

    _, forest = planner.build(ROLLOUTS, OWNERS, judge)
    plans = [*planner.plans(JointForest.alone(forest, OWNERS))]
    peaks = [max(plan.peak_positions) for plan in plans]
    assert peaks == sorted({*peaks}, reverse=True) and len(peaks) == 4
    assert peaks[0] > 40000 > peaks[-1]
    assert segment_lengths(PrefixConfig(), 4) == (16384, 8192, 4096, 2048, 1024)


@pytest.mark.parametrize("given", [0, 8192, "auto"])
def test_nothing_is_joined_where_only_what_waits_keeps_the_limit(given):
    """A joined segment can be neither recomputed nor offloaded until its backward."""
    rollouts, _ = flat_rollouts(900, 100, 4, 4)
    owners = [rollout // 8 for rollout in range(16)]
    planner = StepPlanner(PrefixConfig(segment_tokens=given), COST, 1, 1, 1, None, joins=True)
    for over in (0.0, 1.0):

        def judge(joint, plan, over=over):
            joined = any(segment.joined >= 0 for segment in plan.segments)
            num = len(joint.forest.segments)
            return forecast(plan, over if joined else 0.0, float(num), retains=joined)

        _, forest = planner.build(rollouts, owners, judge)
        joined = any(segment.joined >= 0 for segment in forest.segments)
        assert joined is (over == 0.0)
        assert any(segment.waits for segment in forest.segments) is not joined
