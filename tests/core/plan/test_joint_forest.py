"""Pipelines side by side: one plan for all, which ends though ranks wait at every action."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.features.plan_files.segments import check_segments
from megatron_prefix.features.plan_files.table import from_csv, to_csv
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.joint_forest import JointForest, joint_forest
from megatron_prefix.plan.planner import best_plan, loss_ready_after, make_plan
from megatron_prefix.run.execute.memory_control import longest_segments
from megatron_prefix.tree import Forest, Pairs, Place, Segment, Span, TreeOptions, build
from megatron_prefix.tree.packing import MicrobatchRows
from tests.harness.fuzzing import rounds
from tests.harness.trees import flat_rollouts, random_forest, received


def some(rng: random.Random, num: int) -> tuple[list[Forest], list[list[int]]]:
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


def all_of(forests: list[Forest], microbatches_of: list[list[int]]) -> list[JointForest]:
    return [joint_forest(forests, microbatches_of, place) for place in range(len(forests))]


def renumbered(segment: Segment, new: dict[int, int]) -> Segment:
    """The segment with other numbers of its parents' segments."""
    spans = [
        span._replace(parent=span.parent and Place(new[span.parent.segment], span.parent.number))
        for span in segment.spans
    ]
    joined = -1 if segment.joined < 0 else new[segment.joined]
    return segment._replace(spans=tuple(spans), joined=joined)


def play_together(plans: list[Plan], ready_after: list[list[int]]) -> int:
    """Actions done when no rank of any pipeline can go on.

    A rank runs its next action when it is the same in all pipelines, and each has what its own
    waits for.
    """
    num_ranks, num_stages = plans[0].num_ranks, plans[0].num_stages
    places, done = [0] * num_ranks, [set() for _ in plans]

    def ready(pipeline: int, rank: int) -> bool:
        action = plans[pipeline].programs[rank][places[rank]]
        if action != plans[0].programs[rank][places[rank]]:
            return False
        kind, index, chunk, _ = action
        stage, ran = plans[pipeline].stage(rank, chunk), done[pipeline]
        if kind == "F":
            return stage == 0 or ("F", index, stage - 1) in ran
        if stage < num_stages - 1:
            return ("B", index, stage + 1) in ran
        return ("F", ready_after[pipeline][index], stage) in ran

    moved = True
    while moved:
        moved = False
        for rank in range(num_ranks):
            while places[rank] < len(plans[0].programs[rank]) and all(
                ready(pipeline, rank) for pipeline in range(len(plans))
            ):
                for pipeline, plan in enumerate(plans):
                    kind, index, chunk, _ = plan.programs[rank][places[rank]]
                    done[pipeline].add((kind, index, plan.stage(rank, chunk)))
                places[rank] += 1
                moved = True
    return sum(places)


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
@settings(max_examples=rounds(30, 500))
def test_a_plan_of_the_union_is_one_for_all(rng, num, num_ranks, num_chunks) -> None:
    num_chunks = num_chunks if num_ranks > 1 else 1
    forests, microbatches_of = some(rng, num)
    found = all_of(forests, microbatches_of)
    assert all(each.union == found[0].union for each in found)
    ready_after = [loss_ready_after(each.forest, each.microbatch_of) for each in found]
    for make in (make_plan, best_plan):
        union, microbatches = found[0].union, found[0].union_microbatch_of
        joint = make(union, num_ranks, num_chunks=num_chunks, microbatches=microbatches)
        plans = [Plan(each.forest.segments, joint.programs, num_chunks) for each in found]
        for plan, needs in zip(plans, ready_after, strict=True):
            simulate(plan, ready_after=needs)
            check_segments(plan.segments)
            assert not plan.segments or from_csv(to_csv(plan)) == plan
        num_actions = 2 * num_chunks * num_ranks * len(union.segments)
        assert play_together(plans, ready_after) == num_actions


@given(st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=rounds(30, 500))
def test_every_forest_is_in_the_union_and_fillers_are_padding(rng, num) -> None:
    forests, microbatches_of = some(rng, num)
    for forest, microbatch_of, found in zip(
        forests, microbatches_of, all_of(forests, microbatches_of), strict=True
    ):
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


def test_what_losses_read_adds_up_over_the_forests() -> None:
    options = TreeOptions(min_gain=64)
    forests = [build(*flat_rollouts(40, length, 2, 1), options) for length in (10, 30)]
    union = joint_forest(forests, [range(2)] * 2).union
    assert [s.trained for s in union.segments] == [2 * 10 + 2 * 30]


def test_the_union_of_like_forests_has_no_fillers() -> None:
    forests = [build(*flat_rollouts(64, length, 4, 2)) for length in (4092, 4096)]
    found = joint_forest(forests, [range(8)] * 2)
    assert found.forest == forests[0]
    own = [segment.padded_length for segment in found.forest.segments]
    assert own != [positions for positions, _ in found.most]


@pytest.mark.parametrize("place", [0, 1])
def test_ranks_that_gather_tokens_have_segments_of_one_length(place: int) -> None:
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


def test_joined_segments_run_beside_joined_ones() -> None:
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


def _as_joined(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Each wave as one whose last span continues its first."""
    for index, segment in enumerate(segments):
        if segment.inner:
            yield segment
            continue
        first, *_, last = segment.spans
        below = Span(first.end, 1, 1, first.rollouts, Place(index, 0))
        yield segment._replace(spans=(first, last, below), inner=True, joined=index)


def test_plans_made_apart_hang_together() -> None:
    """What a joint plan is for: the play finds it."""
    forests = [build(*flat_rollouts(6000, 4096, *size)) for size in ((8, 1), (2, 4))]
    microbatches_of = [range(len(forest.num_positions)) for forest in forests]
    filled = [each.forest for each in all_of(forests, microbatches_of)]
    apart = [make_plan(forest, 4) for forest in filled]
    ready_after = [loss_ready_after(forest) for forest in filled]
    assert play_together(apart, ready_after) < sum(map(len, apart[0].programs))


def test_a_wave_ends_before_the_next_if_another_rank_has_fewer() -> None:
    forests = [build(*flat_rollouts(1024, 4096, num, 2)) for num in (3, 6)]
    found = joint_forest(forests, [range(6), range(12)])
    joint = make_plan(found.union, microbatches=found.union_microbatch_of)
    assert joint.programs == make_plan(forests[1]).programs


# Rounds that are cut together ---------------------------------------------------------------------


def uneven(rng: random.Random, num_groups: int) -> list[Pairs]:
    """Groups of four; every rank has other lengths of prompts and responses."""
    draw = np.random.default_rng(rng.randrange(2**32))
    prompt, response, rollouts = rng.choice((10, 40)), rng.choice((8, 30, 90)), []
    for group in range(num_groups):
        first = draw.integers(0, 50, prompt) + 50 * group
        for _ in range(4):
            tokens = np.r_[first, draw.integers(0, 50, response)]
            trained = np.arange(len(tokens) - 1) >= prompt - 1
            rollouts.append(Pairs(tokens[:-1], tokens[1:], trained))
    return rollouts


def test_fillers_of_segments_are_no_rows() -> None:
    """Segments that are padded to whole ones: a filler is nobody's."""
    rollouts, owners = uneven(random.Random(0), 6), [i // 2 for i in range(24)]
    plain, whole = (
        build(rollouts, None, TreeOptions(segment_tokens=100, min_gain=0, pad_multiple=num), owners)
        for num in (1, 16)
    )
    assert any(not span.rollouts for segment in whole.segments for span in segment.spans)
    assert MicrobatchRows.of(whole, owners).inner == MicrobatchRows.of(plain, owners).inner


@pytest.mark.parametrize("seed", range(8))
def test_ordered_losses_hold_up_no_round_cut_together(seed: int) -> None:
    """A rank holds no more than it or another would hold alone, and a round besides."""
    rng = random.Random(seed)
    options, owners = TreeOptions(segment_tokens=100, min_gain=0), [i // 2 for i in range(24)]
    ranks = [uneven(rng, 6) for _ in range(3)]
    alone = [build(rollouts, None, options, owners) for rollouts in ranks]
    rows = MicrobatchRows.most(MicrobatchRows.of(forest, owners) for forest in alone)
    together = [build(rollouts, None, options, owners, rows) for rollouts in ranks]

    def round_of(forest: Forest) -> list[int]:
        of = {}
        for segment, number in zip(forest.segments, forest.rounds, strict=True):
            leaves = [] if segment.inner else segment.spans
            of.update({owners[m]: number for span in leaves for m in span.rollouts})
        return [of[microbatch] for microbatch in range(12)]

    assert round_of(together[0]) == round_of(together[1]) == round_of(together[2])
    for forest in together:
        assert [*forest.rounds] == sorted(forest.rounds)
        assert received(forest) == forest

    def peak(forests: list[Forest]) -> int:
        joint = joint_forest([replace(f, ordered=True) for f in forests], [owners] * len(forests))
        plan = make_plan(joint.union, microbatches=joint.union_microbatch_of)
        assert not joint.union.rounds
        longest = replace(plan, segments=longest_segments(joint))
        return simulate(longest).peak_live_positions

    most = max(peak([forest]) for forest in together)
    assert peak(together) <= most + 2 * 100 + max(map(len, ranks[0]))
