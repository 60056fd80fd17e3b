"""A span and what continues it in one segment: rounds, what runs twice, where nothing is joined."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.segments import check_segments
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.step_planner import StepPlanner
from megatron_prefix.tree import Forest, Pairs, Place, Segment, Span, TreeOptions, build
from megatron_prefix.tree.joining import most_alive
from megatron_prefix.tree.nodes import Node
from megatron_prefix.tree.packing import Packing
from megatron_prefix.tree.payload_map import payload_map
from tests.harness.fuzzing import rounds
from tests.harness.trees import flat_rollouts, received, rollout_sets, tree_options

JOINS = TreeOptions(min_gain=4, segment_gain=32, segment_tokens=100, joins=True, share="batch")


def owners(num: int, each: int) -> list[int]:
    """Microbatches of so many rollouts."""
    return [rollout // each for rollout in range(num)]


@given(rollout_sets(), tree_options(), st.integers(1, 4), st.sampled_from([0, 10, 1000]))
@settings(max_examples=rounds(75, 500))
def test_joined_forests_are_whole(sets, options, each, gain) -> None:
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


def check_whole(forest: Forest, rollouts: list[Pairs], options: TreeOptions) -> None:
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


def test_waves_that_join_are_whole() -> None:
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


def random_rollouts(rng: random.Random) -> list[Pairs]:
    """Trees of up to four levels behind one to three prompts, all of the answers trained."""
    made: list[Pairs] = []

    def grow(before: list[int], depth: int) -> None:
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


def test_a_round_has_its_prompts() -> None:
    """Two groups of four rollouts of 20 + 5, a microbatch a group: each is a segment of 40."""
    forest = build(*flat_rollouts(20, 5, 4, 2), JOINS, owners(8, 4))
    assert [one.padded_length for one in forest.segments] == [80]
    tight = replace(JOINS, segment_tokens=40)
    forest = build(*flat_rollouts(20, 5, 4, 2), tight, owners(8, 4))
    assert [(one.padded_length, one.joined) for one in forest.segments] == [(40, 0), (40, 1)]
    assert [span.parent for span in forest.segments[1].spans] == [None, *[Place(1, 0)] * 4]
    assert forest.executed_tokens == 80


def test_what_few_positions_need_again_runs_again() -> None:
    """A prompt of two rounds runs in both where that is cheaper than a segment of its own."""
    rollouts, groups = flat_rollouts(20, 10, 4, 1)
    for gain, segments in ((21, [40, 40]), (19, [20, 20, 20])):
        options = replace(JOINS, segment_gain=gain, segment_tokens=36)
        forest = build(rollouts, groups, options, owners(4, 2))
        assert [one.padded_length for one in forest.segments] == segments


def test_a_segment_is_as_long_as_what_is_alive() -> None:
    """An eighth above the longest segment: prompt and wave would live at once in any case."""
    rollouts, groups = flat_rollouts(90, 4, 4, 1)
    forest = build(rollouts, groups, JOINS, owners(4, 4))
    assert [one.padded_length for one in forest.segments] == [106]
    forest = build(rollouts, groups, replace(JOINS, segment_tokens=93), owners(4, 4))
    assert [one.padded_length for one in forest.segments] == [90, 16]


def nested(prompt: int, shared: int, suffix: int, groups: int = 1) -> list[Pairs]:
    """Eight rollouts of a prompt, of which two each begin their answers alike."""
    made = []
    for group, pair, one in itertools.product(range(groups), range(4), range(2)):
        here = 1000 * group
        parts = np.array([here + 1, here + 10 + pair, here + 100 + 2 * pair + one, 0])
        tokens = parts.repeat([prompt, shared, suffix, 1])
        made.append(Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= prompt))
    return made


def test_what_few_positions_share_runs_in_the_waves_that_read_it() -> None:
    """A prompt of 100, four pairs that share six more: too few for a segment of their own."""
    options = replace(JOINS, segment_tokens=60)
    forest = build(nested(100, 6, 10), None, options, owners(8, 4))
    check_segments(forest.segments)
    assert received(forest) == forest
    found = [(one.padded_length, one.joined, one.parents) for one in forest.segments]
    assert found == [(99, -1, ()), (56, 1, (0,)), (56, 2, (0,))]
    assert [one.waits for one in forest.segments] == [True, False, False]
    spans = [(one.start, one.length, one.parent) for one in forest.segments[1].spans]
    pair = [(99, 6, Place(0, 0))] * 2
    assert spans == [*pair, *[(105, 11, Place(1, 0))] * 2, *[(105, 11, Place(1, 1))] * 2]
    levels = payload_map(forest.segments).levels[1]
    assert [(run.stop - run.first, run.end - run.start) for run in levels[0].runs] == [(56, 99)]
    assert [(run.stop - run.first, run.end - run.start) for run in levels[1].runs] == [(22, 6)] * 2


def test_a_prompt_whose_rollouts_share_more_stays() -> None:
    """Pairs and halves of 16 rollouts join their wave. The prompt has two halves below it, but with
    it they would have no room, and it would run in every rollout."""
    paths = [(half, pair, one) for half in range(2) for pair in range(4) for one in range(2)]
    tokens = [
        np.array([1, 10 + half, 100 + 4 * half + pair, 1000 + n, 0]).repeat([51, 8, 2, 10, 1])
        for n, (half, pair, _) in enumerate(paths)
    ]
    rollouts = [Pairs(one[:-1], one[1:], one[1:] >= 10) for one in tokens]
    options = replace(JOINS, min_gain=2, segment_tokens=210, segment_gain=60)
    forest = build(rollouts, None, options, owners(16, 4))
    found = [(one.padded_length, one.joined, one.parents) for one in forest.segments]
    assert found == [(50, -1, ()), (208, 1, (0,))]


def test_what_a_node_saves_is_counted_by_the_rounds_that_read_it() -> None:
    """Ten positions of eight rollouts in four microbatches, each long enough for a round. Two nodes
    that join waves are below them: joined too, they would run four times."""
    halves = [
        Node(10, 15, some, [Node(15, 20, [one]) for one in some], joins=True)
        for some in ([0, 1, 2, 3], [4, 5, 6, 7])
    ]
    node = Node(0, 10, [*range(8)], halves)
    others = [Node(0, 100, [one]) for one in range(8, 12)]
    owner = [*range(4)] * 3
    for budget, saved in ((120, 3 * 10), (110, 7 * 10), (0, 10)):
        options = replace(JOINS, segment_tokens=budget)
        packed = Packing([node, *others], [0] * 12, options, owner)
        assert packed.saved(node) == saved, budget


def test_where_nothing_joins_a_wave() -> None:
    """Pairs of other microbatches, too few positions in a round, trees of half a segment or more,
    and what a segment that stays apart reads."""
    rollouts = nested(100, 6, 10)
    options = replace(JOINS, segment_tokens=60)
    for changed, owner in (
        ({}, [0, 1] * 4),
        ({"segment_gain": 200}, owners(8, 4)),
        ({"segment_tokens": 51}, owners(8, 4)),
        ({"joins": False}, owners(8, 4)),
    ):
        forest = build(rollouts, None, replace(options, **changed), owner)
        assert {one.joined for one in forest.segments} == {-1}, changed
        assert forest.executed_tokens == 99 + 8 * 17


def test_what_is_too_short_for_a_span_in_a_round_counts() -> None:
    """Ten positions of three rollouts are worth a span, of the two in a round they are not: they
    run twice there, in a segment that is not longer for it."""
    ends = [np.full(20, 100 + rollout) for rollout in range(3)]
    tokens = [np.concatenate([np.full(40, 1), np.full(10, 2), end, [0]]) for end in ends]
    rollouts = [Pairs(one[:-1], one[1:], one[1:] > 99) for one in [tokens[0][:40], *tokens]]
    options = replace(JOINS, min_gain=15, segment_gain=100, segment_tokens=80)
    for limit, longest in ((81, 63), (90, 101)):
        options = replace(options, segment_tokens=limit)
        lengths = [one.padded_length for one in build(rollouts, None, options, range(4)).segments]
        assert max(lengths) == longest, lengths


def test_most_alive() -> None:
    forest = build(*flat_rollouts(20, 5, 4, 1), replace(JOINS, joins=False, segment_tokens=5))
    lengths = [one.padded_length for one in forest.segments]
    assert lengths == [20, 5, 5, 5, 5]
    assert most_alive(lengths, [one.parents for one in forest.segments]) == 25


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [
        ({"min_gain": 0}, 1),
        ({"memory": "recompute"}, 1),
        ({"memory": "offload"}, 1),
        ({"chunk_tokens": 8}, 1),
        ({"cache_host_layers": 1}, 1),
        ({}, 2),
    ],
)
def test_where_nothing_is_joined(fields: dict, ranks: int) -> None:
    cost = CostModel.of_flops(1.0, 1.0, 0.0)
    rollouts, _ = flat_rollouts(200, 50, 4, 2)
    planner = StepPlanner(PrefixConfig(**fields), cost, 1, ranks, 1, None, joins=True)
    _, forest = planner.build(rollouts, owners(8, 8))
    assert {one.joined for one in forest.segments} == {-1}
    planner = StepPlanner(PrefixConfig(), cost, 1, 1, 1, None, joins=True)
    _, forest = planner.build(rollouts, owners(8, 8))
    assert {one.joined for one in forest.segments} == {0}


def test_rows_of_a_joined_segment() -> None:
    """Its spans read rows of its own; no other segment is waited for."""
    forest = build(*flat_rollouts(20, 5, 4, 2), JOINS, owners(8, 4))
    planned = payload_map(forest.segments)
    [levels], [seen] = planned.levels, planned.positions.visible
    assert seen == () and planned.positions.length == 80
    assert [(run.first, run.stop, run.start, run.end) for run in levels[0].runs] == [
        (40, 60, 0, 20), (60, 80, 20, 40),
    ]  # fmt: skip


def test_every_key_is_in_a_level_once() -> None:
    """Two trees of three levels: sums of gradients in rows that come twice have no fixed order."""
    paths = [(x, y, z) for x in (1, 2) for y in (3, 4) for z in (5, 6)]
    tokens = [np.repeat([x, 10 * x + y, 100 * x + 10 * y + z, 0], 10) for x, y, z in paths]
    rollouts = [Pairs(one[:-1], one[1:], one[1:] > 0) for one in tokens]
    forest = build(rollouts, None, replace(JOINS, segment_tokens=0), owners(8, 8))
    [segment], [levels] = forest.segments, payload_map(forest.segments).levels
    assert segment.joined == 0 and len(levels) == 2
    for level in levels:
        rows = np.concatenate([np.arange(run.start, run.end) for run in level.runs])
        assert len({*rows.tolist()}) == len(rows)


def faults() -> list[tuple[Segment, str]]:
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
def test_faults_of_joined_segments_are_named(segment: Segment, fault: str) -> None:
    if not fault:
        check_segments([segment])
        return
    with pytest.raises(UserError, match=fault):
        check_segments([segment])


def test_nobody_reads_a_joined_segment() -> None:
    root, leaf = Span(0, 4, 4, (0, 1)), Span(4, 2, 2, (0,), Place(0, 0))
    joined = Segment((root, leaf), True, True, joined=0)
    with pytest.raises(UserError, match="is not a span of an inner segment"):
        check_segments([joined, Segment((Span(4, 2, 2, (1,), Place(0, 0)),), False, True)])


def test_a_step_of_no_rollout_has_no_segment() -> None:
    assert build([], None, JOINS, []).segments == ()


def test_equal_rollouts_have_one_leaf() -> None:
    rollouts = [Pairs(np.arange(9), np.arange(1, 10), np.arange(9) > 5) for _ in range(3)]
    forest = build(rollouts, None, JOINS, owners(3, 3))
    assert [len(one.spans) for one in forest.segments] == [1]
    assert not forest.segments[0].inner
