"""The segment tree: coverage, sharing, alignment, chunks, waves, and linear time."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_prefix.data.pairs import pairs_of, pairs_of_groups
from megatron_prefix.errors import UserError
from megatron_prefix.segments import MOST_EXPERTS
from megatron_prefix.tree import Forest, Pairs, Row, Segment, TreeOptions, build
from tests.harness import data
from tests.harness.trees import (
    as_pairs,
    flat_rollouts,
    rollout_sets,
    tree_options,
    trie_size,
    with_routes,
)


def exact(**changes) -> TreeOptions:
    """Nothing dissolved, nothing cut."""
    return TreeOptions(**{"min_gain": 0, "wave_tokens": 0, **changes})


def trees_of(rollouts: list[Pairs], groups: list[int], share: str) -> list[list[Pairs]]:
    found = defaultdict(list)
    for rollout, group in zip(rollouts, groups, strict=True):
        found[group if share == "group" else 0].append(rollout)
    return list(found.values())


def is_prefix_tree(forest: Forest) -> None:
    """F-order is a preorder, and every path runs through it from position 0 to the end."""
    open_path: list[int] = []
    for index, segment in enumerate(forest.segments):
        while open_path and open_path[-1] != segment.parent:
            open_path.pop()
        assert segment.parent == (open_path[-1] if open_path else -1)
        open_path.append(index)
    for rollout, path in enumerate(forest.paths):
        rows = [forest.segments[index].rows[number] for index, number in path]
        ends = [0, *(row.end for row in rows)]
        assert [row.start for row in rows] == ends[:-1]
        assert ends[-1] == forest.num_positions[rollout]
        assert all(row.length > 0 for row in rows)
        parents = [forest.segments[index].parent for index, _ in path]
        assert parents == [-1, *(index for index, _ in path[:-1])]


# Invariants of every forest -----------------------------------------------------------------------


@given(rollout_sets(), tree_options())
@settings(max_examples=150)
def test_every_rollout_is_covered_once_in_order(sets, options) -> None:
    is_prefix_tree(build(*sets, options))


@given(rollout_sets(), tree_options())
@settings(max_examples=100)
def test_shared_rows_hold_the_same_pairs_and_one_tree_each(sets, options) -> None:
    rollouts, groups = sets
    forest = build(rollouts, groups, options)
    tree_of_group = {}
    for segment in forest.segments:
        for row in segment.rows:
            first = rollouts[row.rollouts[0]]
            for member in row.rollouts:
                for name in ("inputs", "labels"):
                    mine = getattr(rollouts[member], name)[row.start : row.end]
                    assert np.array_equal(mine, getattr(first, name)[row.start : row.end])
                if options.share == "group":
                    assert tree_of_group.setdefault(segment.tree, groups[member]) == groups[member]


@given(rollout_sets(), tree_options(), st.data())
@settings(max_examples=60)
def test_positions_are_shared_as_far_as_their_routes_agree(sets, options, data) -> None:
    rollouts, groups = sets
    options = replace(options, min_gain=0, loss_in_leaves=False)
    parts = [data.draw(st.integers(0, 2 * len(rollout))) for rollout in rollouts]
    routed = with_routes(rollouts, layers=2, experts=8, parts=parts)
    forest = build(routed, groups, options)
    trees = trees_of(routed, groups, options.share)
    assert forest.executed_tokens == sum(trie_size(tree, options.align) for tree in trees)
    free = build(rollouts, groups, options)
    assert forest.unshared_by_routes == forest.executed_tokens - free.executed_tokens
    assert free.unshared_by_routes == 0
    assert Forest.from_ints(forest.to_ints()) == forest
    for segment in forest.segments:
        for row in segment.rows:
            taken = [routed[member].routes[row.start : row.end] for member in row.rollouts]
            assert all(np.array_equal(taken[0], other) for other in taken)


def test_routes_that_no_model_can_follow_are_refused() -> None:
    rollout = as_pairs([1, 2, 3], [2, 3, 4], [True] * 3)

    def routed(*values: int, shape: tuple[int, ...] = (3, 1, 1)) -> Pairs:
        return replace(rollout, routes=np.resize(values, shape))

    build([routed(0, MOST_EXPERTS - 1)] * 2)
    for bad, words in (
        ([routed(0), rollout], r"several shapes \(.*\): give all or none"),
        ([routed(0), routed(0, shape=(3, 2, 1))], "several shapes"),
        ([routed(0, shape=(2, 1, 1))], r"rollout 0: routes \[2, 1, 1\] for 3 positions"),
        ([routed(0, shape=(3, 1))], r"give \[positions, layers, topk\]"),
        ([routed(0), routed(-1)], "rollout 1: routes from -1 to -1"),
        ([routed(MOST_EXPERTS)], f"0 to {MOST_EXPERTS - 1}"),
    ):
        with pytest.raises(UserError, match=words):
            build(bad)


@given(rollout_sets(), tree_options())
@settings(max_examples=100)
def test_boundaries_are_aligned_and_inner_segments_are_not_padded(sets, options) -> None:
    forest = build(*sets, options)
    assert forest.align == options.align
    for segment in forest.segments:
        for row in segment.rows:
            assert row.start % options.align == 0
            assert row.padded % options.align == 0
            assert 0 <= row.padded - row.length < options.align
        if segment.inner:
            (row,) = segment.rows
            assert row.padded == row.length
        assert segment.inner == any(
            other.parent == index
            for index, mine in enumerate(forest.segments)
            if mine is segment
            for other in forest.segments
        )


@given(rollout_sets(), tree_options())
@settings(max_examples=100)
def test_chunks_keep_the_limit_and_extend_their_parent(sets, options) -> None:
    forest = build(*sets, options)
    limit = options.chunk_tokens // options.align * options.align
    for segment in forest.segments:
        for row in segment.rows if limit else ():
            first = min(forest.first_trained[member] for member in row.rollouts)
            # Only a leaf kept whole for its loss may be longer, and it starts where the loss does.
            whole = options.loss_in_leaves and not segment.inner and first < row.end
            assert row.length <= limit or (
                whole and row.start // options.align == first // options.align
            )
        if segment.extends:
            parent = forest.segments[segment.parent]
            assert segment.inner and parent.inner and limit
            assert parent.rows[0].rollouts == segment.rows[0].rollouts
            assert sum(other.parent == segment.parent for other in forest.segments) == 1


@given(rollout_sets(), tree_options())
@settings(max_examples=100)
def test_waves_hold_siblings_within_the_budget(sets, options) -> None:
    forest = build(*sets, options)
    for segment in forest.segments:
        assert len({row.start for row in segment.rows}) == 1
        if len(segment.rows) > 1 and options.wave_tokens:
            assert segment.num_rows <= options.wave_tokens
        if not options.wave_tokens and not segment.inner:
            waves = [s for s in forest.segments if not s.inner and s.parent == segment.parent]
            assert len([s for s in waves if s.tree == segment.tree]) == 1


@given(rollout_sets(), tree_options())
@settings(max_examples=100)
def test_scored_segments_reach_a_trained_position(sets, options) -> None:
    rollouts, groups = sets
    forest = build(rollouts, groups, options)
    for segment in forest.segments:
        reached = [
            row.end > rollouts[m].first_trained for row in segment.rows for m in row.rollouts
        ]
        assert segment.scored == any(reached)
    for rollout, path in enumerate(forest.paths):
        rows = [forest.segments[index].rows[number] for index, number in path]
        first = rollouts[rollout].first_trained
        assert forest.cut(rollout) == next(row.start for row in rows if row.end > first)


@given(rollout_sets(), tree_options())
@settings(max_examples=150)
def test_loss_in_leaves_shares_trained_positions_with_copies_only(sets, options) -> None:
    rollouts, groups = sets
    options = TreeOptions(**{**vars(options), "loss_in_leaves": True})
    forest = build(rollouts, groups, options)
    for segment in forest.segments:
        for row in segment.rows:
            if any(row.end > rollouts[member].first_trained for member in row.rollouts):
                assert not segment.inner
                assert len({rollouts[member].inputs.tobytes() for member in row.rollouts}) == 1


# What is shared -----------------------------------------------------------------------------------


@given(rollout_sets(), st.sampled_from([1, 1, 2, 3, 4, 8, 16]), st.sampled_from(["group", "batch"]))
@settings(max_examples=150)
def test_executed_tokens_are_those_of_the_trie(sets, align, share) -> None:
    rollouts, groups = sets
    forest = build(rollouts, groups, exact(align=align, share=share))
    trees = trees_of(rollouts, groups, share)
    assert forest.executed_tokens == sum(trie_size(tree, align) for tree in trees)
    assert forest.raw_tokens == sum(map(len, rollouts))


@given(rollout_sets(), tree_options())
@settings(max_examples=100)
def test_cutting_chunks_and_waves_changes_no_sharing(sets, options) -> None:
    uncut = TreeOptions(**{**vars(options), "chunk_tokens": 0, "wave_tokens": 0})
    assert build(*sets, options).executed_tokens == build(*sets, uncut).executed_tokens


@given(rollout_sets(), st.integers(0, 40), st.sampled_from([1, 2, 4]))
@settings(max_examples=100)
def test_dissolving_leaves_only_segments_that_save_enough(sets, min_gain, align) -> None:
    rollouts, groups = sets
    forest = build(rollouts, groups, exact(min_gain=min_gain, align=align))
    least = build(rollouts, groups, exact(align=align)).executed_tokens
    # Copies share their leaf whatever the gain; nothing else may fall back to more than that.
    most = sum(len({(r.inputs.tobytes(), r.labels.tobytes()) for r in tree} and tree) and sum(
        len(one) for one in {(r.inputs.tobytes(), r.labels.tobytes()): r for r in tree}.values()
    ) for tree in trees_of(rollouts, groups, "group"))  # fmt: skip
    assert least <= forest.executed_tokens <= most
    for index, segment in enumerate(forest.segments):
        if segment.inner:
            below = [s for s in forest.segments if s.parent == index]
            children = [row for s in below for row in s.rows]
            carried = {member for row in children for member in row.rollouts}
            branches = len(children) + (carried != set(segment.rows[0].rollouts))
            assert (branches - 1) * segment.rows[0].length >= min_gain
    if min_gain > 40 * len(rollouts):
        assert not any(segment.inner for segment in forest.segments)


@given(rollout_sets(), tree_options(), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_sharing_does_not_depend_on_the_order_of_rollouts(
    sets, options, rng: random.Random
) -> None:
    rollouts, groups = sets
    order = list(range(len(rollouts)))
    rng.shuffle(order)
    shuffled = build([rollouts[i] for i in order], [groups[i] for i in order], options)
    straight = build(rollouts, groups, options)
    assert shuffled.executed_tokens == straight.executed_tokens
    assert shuffled.max_depth == straight.max_depth


# Cases by hand ------------------------------------------------------------------------------------


def shape(forest: Forest) -> list[tuple]:
    """Segments as (parent, [(start, length, rollouts)])."""
    return [
        (s.parent, [(row.start, row.length, row.rollouts) for row in s.rows])
        for s in forest.segments
    ]


def test_a_flat_group_is_one_inner_segment_and_a_wave() -> None:
    rollouts, groups = flat_rollouts(prefix=10, suffix=4, num=3, num_groups=1)
    forest = build(rollouts, groups, exact())
    assert shape(forest) == [
        (-1, [(0, 10, (0, 1, 2))]),
        (0, [(10, 4, (0,)), (10, 4, (1,)), (10, 4, (2,))]),
    ]
    assert [segment.scored for segment in forest.segments] == [False, True]
    assert (forest.raw_tokens, forest.executed_tokens, forest.max_depth) == (42, 22, 2)
    assert forest.ancestors(1) == [0]
    assert forest.ancestors(0) == []


def test_the_last_prompt_token_falls_into_the_branches_by_its_label() -> None:
    prompt = [5, 6, 7]
    rollouts = [
        as_pairs([*prompt, *answer[:-1]], [*prompt[1:], *answer], [False, False, True, True])
        for answer in ([1, 9], [2, 9])
    ]
    assert shape(build(rollouts, None, exact())) == [
        (-1, [(0, 2, (0, 1))]),
        (0, [(2, 2, (0,)), (2, 2, (1,))]),
    ]


def test_boundaries_round_toward_the_root() -> None:
    rollouts, groups = flat_rollouts(prefix=10, suffix=3, num=2, num_groups=1)
    assert shape(build(rollouts, groups, exact(align=4))) == [
        (-1, [(0, 8, (0, 1))]),
        (0, [(8, 5, (0,)), (8, 5, (1,))]),
    ]
    wave = build(rollouts, groups, exact(align=4)).segments[1]
    assert [row.padded for row in wave.rows] == [8, 8]
    assert wave.num_rows == 16
    assert wave.start == 8


def test_chunks_are_nearly_equal() -> None:
    rollouts, groups = flat_rollouts(prefix=10, suffix=3, num=2, num_groups=1)
    forest = build(rollouts, groups, exact(chunk_tokens=4))
    assert [row.length for s in forest.segments for row in s.rows] == [3, 3, 4, 3, 3]
    assert [s.extends for s in forest.segments] == [False, True, True, False]


def test_a_proper_prefix_ends_in_an_inner_segment() -> None:
    long = as_pairs(range(8), range(1, 9), [False] * 4 + [True] * 4)
    short = as_pairs(range(5), range(1, 6), [False] * 4 + [True])
    forest = build([long, short], None, exact())
    assert shape(forest) == [(-1, [(0, 5, (0, 1))]), (0, [(5, 3, (0,))])]
    assert forest.paths == (((0, 0), (1, 0)), ((0, 0),))
    assert forest.segments[0].scored


def test_copies_share_one_leaf() -> None:
    one = as_pairs([1, 2, 3], [2, 3, 4], [False, True, True])
    forest = build([one, one, one], None, exact())
    assert shape(forest) == [(-1, [(0, 3, (0, 1, 2))])]
    assert not forest.segments[0].inner


def test_a_segment_that_saves_exactly_the_least_gain_stays() -> None:
    rollouts, groups = flat_rollouts(prefix=10, suffix=4, num=3, num_groups=1)
    assert build(rollouts, groups, exact(min_gain=20)).executed_tokens == 22
    assert shape(build(rollouts, groups, exact(min_gain=21))) == [
        (-1, [(0, 14, (0,)), (0, 14, (1,)), (0, 14, (2,))])
    ]


def test_a_rollout_that_ends_inside_counts_as_a_branch() -> None:
    long = as_pairs(range(8), range(1, 9), [False] * 4 + [True] * 4)
    short = as_pairs(range(5), range(1, 6), [False] * 4 + [True])
    kept = build([long, short], None, exact(min_gain=5))
    assert shape(kept) == [(-1, [(0, 5, (0, 1))]), (0, [(5, 3, (0,))])]
    dissolved = build([long, short], None, exact(min_gain=6))
    assert sorted(dissolved.segments[0].rows) == [(0, 5, 5, (1,)), (0, 8, 8, (0,))]


def test_dissolving_hands_the_positions_to_the_children() -> None:
    """Three levels; the short one in the middle goes, the ones around it stay."""
    rows = [[0] * 6 + [1] + [a] * 4 + [b] * 2 for a, b in ((2, 3), (2, 4), (5, 6), (5, 7))]
    rows += [[0] * 6 + [8] * 7]
    rollouts = [as_pairs(row, row, [True] * len(row)) for row in rows]
    assert shape(build(rollouts, None, exact(min_gain=3))) == [
        (-1, [(0, 6, (0, 1, 2, 3, 4))]),
        (0, [(6, 5, (0, 1))]),
        (1, [(11, 2, (0,)), (11, 2, (1,))]),
        (0, [(6, 5, (2, 3))]),
        (3, [(11, 2, (2,)), (11, 2, (3,))]),
        (0, [(6, 7, (4,))]),
    ]


def test_a_rollout_without_loss_counts_as_trained_at_its_end() -> None:
    rollout = as_pairs([1, 2, 3], [2, 3, 4], [False] * 3)
    assert rollout.first_trained == 2
    forest = build([rollout], None, exact(chunk_tokens=1))
    assert [segment.scored for segment in forest.segments] == [False, False, True]


def test_loss_in_leaves_heeds_the_earliest_loss_of_copies() -> None:
    """A copy that is trained earlier keeps its loss out of what others share too."""
    late = as_pairs([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], [False, False, False, False, True])
    early = Pairs(late.inputs, late.labels, np.arange(5) >= 1)
    other = as_pairs([1, 2, 3, 4, 9], [2, 3, 4, 9, 9], [False, False, False, False, True])
    forest = build([late, early, other], None, exact(loss_in_leaves=True))
    assert shape(forest) == [(-1, [(0, 1, (0, 1, 2))]), (0, [(1, 4, (0, 1)), (1, 4, (2,))])]


def test_groups_share_only_when_asked() -> None:
    rollouts, _ = flat_rollouts(prefix=6, suffix=2, num=2, num_groups=1)
    apart = build(rollouts, [0, 1], exact())
    assert (apart.executed_tokens, [s.tree for s in apart.segments]) == (16, [0, 1])
    assert build(rollouts, [0, 1], exact(share="batch")).executed_tokens == 10


def test_a_rollout_of_one_position() -> None:
    single = as_pairs([3], [4], [True])
    assert shape(build([single], None, exact(align=8, chunk_tokens=8))) == [(-1, [(0, 1, (0,))])]


def test_no_rollouts_make_no_segments() -> None:
    forest = build([], None, exact())
    assert (forest.segments, forest.raw_tokens, forest.max_depth) == ((), 0, 0)


def test_the_cut_of_a_rollout_without_its_loss_is_an_error() -> None:
    row = Row(0, 2, 2, (0,))
    forest = Forest((Segment(-1, 0, (row,), False, False, True),), (2,), (5,))
    with pytest.raises(RuntimeError, match="ends before its first trained position"):
        forest.cut(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align": 0}, "align is 0"),
        ({"chunk_tokens": -1}, "chunk_tokens is -1"),
        ({"wave_tokens": -2}, "wave_tokens is -2"),
        ({"min_gain": -3}, "min_gain is -3"),
        ({"align": 8, "chunk_tokens": 4}, "chunk_tokens 4 is below the alignment 8"),
        ({"share": "all"}, "share is 'all'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message) -> None:
    with pytest.raises(UserError, match=message):
        TreeOptions(**options)


def test_rollouts_that_mean_nothing_are_refused() -> None:
    good = as_pairs([1], [2], [True])
    with pytest.raises(UserError, match="rollout 1: 0 inputs"):
        build([good, as_pairs([], [], [])])
    with pytest.raises(UserError, match="rollout 0: 1 inputs, 2 labels"):
        build([as_pairs([1], [2, 3], [True])])
    with pytest.raises(UserError, match="1 group numbers for 2 rollouts"):
        build([good, good], [0])


# Real rollouts and time ---------------------------------------------------------------------------


def test_the_bundled_rollouts_share_what_their_trie_shares() -> None:
    from megatron_prefix.data.rollouts import read_groups

    groups = list(read_groups(data.BUNDLED))
    rollouts, numbers = pairs_of_groups(groups)
    forest = build(rollouts, numbers, exact())
    is_prefix_tree(forest)
    assert forest.executed_tokens == sum(map(trie_size, trees_of(rollouts, numbers, "group")))


@pytest.mark.parametrize(
    ("name", "num_groups"), [("gsm8k", 20), ("math_cot", 10), ("rag_hotpot_llm", 2)]
)
def test_real_rollouts_share_what_their_trie_shares(name, num_groups) -> None:
    groups = data.groups(name, num_groups)
    rollouts, numbers = pairs_of_groups(groups)
    forest = build(rollouts, numbers, exact())
    is_prefix_tree(forest)
    assert forest.executed_tokens == sum(map(trie_size, trees_of(rollouts, numbers, "group")))


def test_pairs_of_a_rollout() -> None:
    rollout = data.groups("gsm8k", 1)[0].rollouts[0]
    pairs = pairs_of(rollout)
    assert len(pairs) == len(rollout) - 1
    assert np.array_equal(pairs.inputs[1:], pairs.labels[:-1])
    trained = [start - 1 for start, _ in rollout.loss]
    assert pairs.first_trained == trained[0]
    assert pairs.trained.sum() == rollout.num_trained


def caterpillar(num: int, length: int) -> list[Pairs]:
    """Each rollout leaves the common one a little later: as deep as there are rollouts."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1000, length + 1)
    rollouts = []
    for index in range(num):
        tokens, parted = base.copy(), length * (index + 1) // (num + 1)
        tokens[parted:] = rng.integers(1000, 2000, length + 1 - parted)
        rollouts.append(Pairs(tokens[:-1], tokens[1:], np.arange(length) >= length // 2))
    return rollouts


@pytest.mark.parametrize("options", [exact(), TreeOptions(align=8, chunk_tokens=512)])
@pytest.mark.parametrize("kind", ["flat", "caterpillar", "own"])
def test_a_thousand_rollouts_of_ten_thousand_tokens_take_seconds(kind, options) -> None:
    """The bound is the issue's; what it takes on one core is a tenth of it."""
    num, length = 1000, 10_000
    if kind == "flat":
        rollouts, _ = flat_rollouts(length // 2, length // 2, num, 1)
    elif kind == "caterpillar":
        rollouts = caterpillar(num, length)
    else:
        tokens = np.random.default_rng(0).integers(0, 1000, (num, length + 1))
        rollouts = [Pairs(row[:-1], row[1:], np.arange(length) >= 100) for row in tokens]
    begin = time.process_time()
    forest = build(rollouts, None, options)
    assert time.process_time() - begin < 5
    assert forest.raw_tokens == num * length


def test_deep_trees_need_no_recursion() -> None:
    """More levels than Python has stack frames."""
    length = 3000
    rollouts = [
        as_pairs(range(n), range(1, n + 1), [False] * (n - 1) + [True]) for n in range(1, length)
    ]
    forest = build(rollouts, None, exact())
    assert (forest.max_depth, forest.executed_tokens) == (length - 1, length - 1)


@example([3, 3, 3])
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_padding_is_counted_in_rows_and_not_in_tokens(lengths) -> None:
    rollouts = [
        as_pairs([i] * n, [i] * n, [True] * n)
        for i, n in zip(itertools.count(), lengths, strict=False)
    ]
    forest = build(rollouts, None, exact(align=4))
    assert forest.executed_tokens == sum(lengths)
    assert sum(s.num_rows for s in forest.segments) == sum(-(-n // 4) * 4 for n in lengths)
