"""The segment tree: cases by hand, real rollouts, and linear time."""

import itertools
import sys
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.errors import UserError
from megatron_prefix.lab.plans.forest import max_depth, num_trees, trees
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.planner import best_plan, loss_ready_after
from megatron_prefix.run.read.step import with_next_tokens
from megatron_prefix.tree import Pairs, Place, TreeOptions, build, find_shared
from megatron_prefix.tree.forest import MOST_EXPERTS
from megatron_prefix.tree.payload_map import payload_map
from tests.harness.fuzzing import rounds
from tests.harness.trees import (
    ancestors,
    as_pairs,
    exact,
    flat_rollouts,
    is_prefix_tree,
    received,
    rollout_sets,
    tree_options,
    trees_of,
    trie_size,
    with_routes,
)


def shape(forest):
    """Segments as (segments of the parents, [(start, length, rollouts)])."""
    return [
        (s.parents, [(span.start, span.length, span.rollouts) for span in s.spans])
        for s in forest.segments
    ]


def test_small_trees_share_segments_and_spans_know_their_parents():
    """Two flat groups, one of them with two levels, and a rollout that shares nothing."""
    rows = [[0] * 4 + [a] * 2 for a in (1, 2)]
    rows += [[3] * 3 + [4] * 2 + [a] * 2 for a in (5, 6)] + [[3] * 3 + [7], [8] * 5]
    rollouts = [as_pairs(row, row, [True] * len(row)) for row in rows]
    forest = build(rollouts, [0, 0, 1, 1, 1, 2], exact())
    assert shape(forest) == [
        ((), [(0, 4, (0, 1)), (0, 3, (2, 3, 4))]),
        ((0,), [(3, 2, (2, 3))]),
        ((0, 1), [
            (0, 5, (5,)), (4, 2, (0,)), (4, 2, (1,)), (3, 1, (4,)), (5, 2, (2,)), (5, 2, (3,)),
        ]),
    ]  # fmt: skip
    assert [span.parent for span in forest.segments[2].spans] == [
        None, Place(0, 0), Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 0),
    ]  # fmt: skip
    assert trees(forest.segments) == [(0, 1), (1,), (2, 0, 0, 1, 1, 1)]
    assert (num_trees(forest.segments), max_depth(forest), forest.executed_tokens) == (3, 3, 23)
    assert forest.paths[3] == (Place(0, 1), Place(1, 0), Place(2, 5))


def test_what_is_behind_the_last_loss_is_not_computed():
    """A tool's last answer, a rollout without loss, and one whose last position carries loss."""
    tokens = [1, 2, 3, 4, 5, 6, 7]
    flags = ([0, 0, 0, 1, 0, 0], [0] * 6, [0, 0, 0, 0, 0, 1])
    rollouts = [as_pairs(tokens[:-1], tokens[1:], one).up_to_loss() for one in flags]
    assert [one.num_needed for one in rollouts] == [4, 2, 6]
    forest = build(rollouts, options=exact())
    assert (forest.raw_tokens, forest.executed_tokens) == (18, 6)
    ends = [forest.segments[s].spans[n].end for s, n in (path[-1] for path in forest.paths)]
    assert ends == [4, 2, 6] and forest.first_trained == (3, 1, 5)
    assert all(forest.segments[path[-1].segment].scored for path in forest.paths)


@pytest.mark.parametrize(("options", "message"), [
    ({"multiple": 0}, "multiple is 0"), ({"chunk_tokens": -1}, "chunk_tokens is -1"),
    ({"segment_tokens": -2}, "segment_tokens is -2"), ({"min_gain": -3}, "min_gain is -3"),
    ({"cut": 0}, "cut is 0"),
    ({"multiple": 8, "chunk_tokens": 4}, "chunk_tokens 4 is below the alignment 8"),
    ({"multiple": 4, "cut": 6, "chunk_tokens": 8}, "below the alignment 12"),
    ({"share": "all"}, "share is 'all'"),
    (dict(joins=True, chunk_tokens=8), "joins with chunk_tokens"),
])  # fmt: skip
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        TreeOptions(**options)


def test_rollouts_that_mean_nothing_are_refused():
    good = as_pairs([1], [2], [True])
    with pytest.raises(UserError, match="rollout 1: 0 inputs"):
        build([good, as_pairs([], [], [])])
    with pytest.raises(UserError, match="rollout 0: 1 inputs, 2 labels"):
        build([as_pairs([1], [2, 3], [True])])
    with pytest.raises(UserError, match="1 group numbers for 2 rollouts"):
        build([good, good], [0])


def test_numbers_of_rows_are_told_apart_by_every_bit():
    """The second rollout's fifth is another; without labels the next numbers are in their place."""
    numbers = np.random.default_rng(0).integers(2**62, 2**63 - 1, 8)
    for bit in range(63):
        rows = numbers, numbers ^ np.where(np.arange(8) == 4, 1 << bit, 0)
        labelled = [as_pairs(row, range(8), [True] * 8) for row in rows]
        ahead = with_next_tokens([as_pairs(row, [*row[1:], -2], [True] * 8) for row in rows])
        assert build(labelled, [0, 0], exact()).executed_tokens == 12
        assert build(ahead, [0, 0], exact()).executed_tokens == 13


def caterpillar(num, length):
    """Each rollout leaves the common one a little later: as deep as there are rollouts."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1000, length + 1)
    rollouts = []
    for index in range(num):
        tokens, parted = base.copy(), length * (index + 1) // (num + 1)
        tokens[parted:] = rng.integers(1000, 2000, length + 1 - parted)
        rollouts.append(Pairs(tokens[:-1], tokens[1:], np.arange(length) >= length // 2))
    return rollouts


@pytest.mark.parametrize("kind", ["flat", "caterpillar"])
def test_a_thousand_rollouts_of_ten_thousand_tokens_take_seconds(kind):
    """The bound is the issue's; what it takes on one core is a tenth of it."""
    num, length = 1000, 10_000
    if kind == "flat":
        rollouts, _ = flat_rollouts(length // 2, length // 2, num, 1)
    else:
        rollouts = caterpillar(num, length)
    begin = time.process_time()
    forest = build(rollouts, None, TreeOptions(multiple=8, chunk_tokens=512))
    assert time.process_time() - begin < 5
    assert forest.raw_tokens == num * length


def test_deep_trees_need_no_recursion():
    """More levels than Python has stack frames."""
    length = sys.getrecursionlimit() + 200
    rollouts = [
        as_pairs(range(n), range(1, n + 1), [False] * (n - 1) + [True]) for n in range(1, length)
    ]
    forest = build(rollouts, None, exact())
    assert (max_depth(forest), forest.executed_tokens) == (length - 1, length - 1)


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(30, 500))
def test_shared_rows_hold_the_same_pairs_and_one_tree_each(sets, options):
    rollouts, groups = sets
    forest = build(rollouts, groups, options)
    tree_of_group = {}
    for segment, numbers in zip(forest.segments, trees(forest.segments), strict=True):
        for span, tree in zip(segment.spans, numbers, strict=True):
            first = rollouts[span.rollouts[0]]
            for member in span.rollouts:
                for name in ("inputs", "labels"):
                    mine = getattr(rollouts[member], name)[span.start : span.end]
                    assert np.array_equal(mine, getattr(first, name)[span.start : span.end])
                if options.share == "group":
                    assert tree_of_group.setdefault(tree, groups[member]) == groups[member]


@given(rollout_sets(), tree_options(), st.data())
@settings(max_examples=rounds(30, 500))
def test_positions_are_shared_as_far_as_their_routes_agree(sets, options, data):
    rollouts, groups = sets
    options = replace(options, min_gain=0, loss_in_leaves=False)
    parts = [data.draw(st.integers(0, 2 * len(rollout))) for rollout in rollouts]
    routed = with_routes(rollouts, layers=2, experts=8, parts=parts)
    forest = build(routed, groups, options)
    apart = trees_of(routed, groups, options.share)
    assert forest.executed_tokens == sum(trie_size(tree, options.boundary) for tree in apart)
    free = build(rollouts, groups, options)
    assert forest.unshared_by_routes == forest.executed_tokens - free.executed_tokens
    assert free.unshared_by_routes == 0
    assert received(forest) == forest
    for segment in forest.segments:
        for span in segment.spans:
            taken = [routed[member].routes[span.start : span.end] for member in span.rollouts]
            assert all(np.array_equal(taken[0], other) for other in taken)


def test_routes_that_no_model_can_follow_are_refused():
    rollout = as_pairs([1, 2, 3], [2, 3, 4], [True] * 3)

    def routed(*values, shape=(3, 1, 1)):
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
@settings(max_examples=rounds(30, 500))
def test_spans_are_aligned_and_segments_are_as_options_say(sets, options):
    forest = build(*sets, options)
    is_prefix_tree(forest)
    assert forest.multiple == options.multiple
    padded = sum(span.padded for segment in forest.segments for span in segment.spans)
    assert sum(segment.padded_length for segment in forest.segments) == padded
    read = {span.parent for segment in forest.segments for span in segment.spans}
    for index, segment in enumerate(forest.segments):
        for span in segment.spans:
            assert span.start % options.boundary == 0
            assert span.padded % options.multiple == 0
            assert 0 <= span.padded - span.length < options.multiple
        if segment.inner:
            assert all(span.padded == span.length for span in segment.spans)
        if len(segment.spans) > 1 and options.segment_tokens:
            assert segment.padded_length <= options.segment_tokens
        for number in range(len(segment.spans)):
            assert segment.inner == (Place(index, number) in read)
            above = ancestors(forest.segments, Place(index, number))
            assert not any(place.segment == index for place in above)
        assert segment.scored == any(
            span.end > sets[0][one].first_trained for span in segment.spans for one in span.rollouts
        )


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(30, 500))
def test_chunks_keep_the_limit_and_nothing_else_is_a_chain(sets, options):
    forest = build(*sets, options)
    limit = options.chunk_tokens // options.boundary * options.boundary
    for segment in forest.segments:
        for span in segment.spans if limit else ():
            first = min(forest.first_trained[member] for member in span.rollouts)
            # Only a leaf kept whole for its loss may be longer, and it starts where the loss does.
            whole = options.loss_in_leaves and not segment.inner and first < span.end
            assert span.length <= limit or (
                whole and span.start // options.boundary == first // options.boundary
            )
        for span in () if limit else segment.spans:
            above = span.parent
            if above is not None:
                parent = forest.segments[above.segment].spans[above.number]
                assert len(span.rollouts) < len(parent.rollouts)


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(40, 500))
def test_loss_in_leaves_shares_trained_positions_of_copies(sets, options):
    rollouts, groups = sets
    options = TreeOptions(**{**vars(options), "loss_in_leaves": True})
    forest = build(rollouts, groups, options)
    for segment in forest.segments:
        for span in segment.spans:
            if any(span.end > rollouts[member].first_trained for member in span.rollouts):
                assert not segment.inner
                assert len({rollouts[member].inputs.tobytes() for member in span.rollouts}) == 1


@given(rollout_sets(), st.sampled_from([1, 1, 2, 3, 4, 8, 16]), st.sampled_from(["group", "batch"]))
@settings(max_examples=rounds(40, 500))
def test_executed_tokens_are_those_of_the_trie(sets, align, share):
    rollouts, groups = sets
    forest = build(rollouts, groups, exact(multiple=align, share=share))
    apart = trees_of(rollouts, groups, share)
    assert forest.executed_tokens == sum(trie_size(tree, align) for tree in apart)
    assert forest.raw_tokens == sum(map(len, rollouts))


@given(rollout_sets(), st.integers(0, 40), st.sampled_from([1, 2, 4]))
@settings(max_examples=rounds(30, 500))
def test_dissolving_leaves_only_segments_that_save_enough(sets, min_gain, align):
    rollouts, groups = sets
    forest = build(rollouts, groups, exact(min_gain=min_gain, multiple=align))
    least = build(rollouts, groups, exact(multiple=align)).executed_tokens
    # Copies share their leaf whatever the gain; nothing else may fall back to more than that.
    most = sum(len({(r.inputs.tobytes(), r.labels.tobytes()) for r in tree} and tree) and sum(
        len(one) for one in {(r.inputs.tobytes(), r.labels.tobytes()): r for r in tree}.values()
    ) for tree in trees_of(rollouts, groups, "group"))  # fmt: skip
    assert least <= forest.executed_tokens <= most
    below = {}  # rollouts of every child
    branches = Counter()
    for segment in forest.segments:
        for span in segment.spans:
            if span.parent is not None:
                branches[span.parent] += 1
                below.setdefault(span.parent, []).extend(span.rollouts)
    for place, num in branches.items():
        span = forest.segments[place.segment].spans[place.number]
        copies = num + ({*below[place]} != {*span.rollouts})
        assert (copies - 1) * span.length >= min_gain
    if min_gain > 40 * len(rollouts):
        assert not any(segment.inner for segment in forest.segments)


@given(rollout_sets(), tree_options(), st.randoms(use_true_random=False))
@settings(max_examples=rounds(30, 500))
def test_sharing_does_not_depend_on_the_order_of_rollouts(sets, options, rng):
    rollouts, groups = sets
    order = list(range(len(rollouts)))
    rng.shuffle(order)
    shuffled = build([rollouts[i] for i in order], [groups[i] for i in order], options)
    straight = build(rollouts, groups, options)
    assert shuffled.executed_tokens == straight.executed_tokens
    assert max_depth(shuffled) == max_depth(straight)


# Packing: which spans share a segment, how many segments there are, and what must be held ---------


@given(rollout_sets(), tree_options(), st.sampled_from([1, 5, 20, 100]))
@settings(max_examples=rounds(40, 500))
def test_inner_segments_save_at_least_the_gain_of_a_segment(sets, options, gain):
    plain = TreeOptions(**{**vars(options), "chunk_tokens": 0})
    forest = build(*sets, TreeOptions(**{**vars(plain), "segment_gain": gain}))
    is_prefix_tree(forest)
    read, carried = Counter(), Counter()
    for segment in forest.segments:
        for span in segment.spans:
            read[span.parent] += 1
            carried[span.parent] += len(span.rollouts)
    for index, segment in enumerate(forest.segments):
        if segment.inner:
            saved = 0
            for number, span in enumerate(segment.spans):
                here = Place(index, number)
                ends = carried[here] < len(span.rollouts)
                saved += (read[here] + ends - 1) * span.length
            assert saved >= min(gain, forest.raw_tokens // 16)
    assert build(*sets, plain).executed_tokens <= forest.executed_tokens <= forest.raw_tokens


def live(forest, microbatch_of):
    plan = best_plan(forest, microbatches=tuple(microbatch_of))
    return simulate(plan, ready_after=loss_ready_after(forest, microbatch_of)).peak_live_positions


def two_prompts_in_turn(num_groups):
    """Groups of two rollouts; every other group has the same long beginning."""
    found = []
    for group in range(num_groups):
        system = np.arange(60) + 1000 * (group % 2)
        question = np.arange(20) + 10_000 + 100 * group
        for rollout in range(2):
            answer = np.arange(30) + 100_000 + 1000 * group + 100 * rollout
            tokens = np.concatenate([system, question, answer])
            found.append(Pairs(tokens[:-1], tokens[1:], np.arange(109) >= 80))
    return found


def test_groups_over_many_microbatches_do_not_hold_all_leaves():
    """Two prompts alternate, and a microbatch has a group of each."""
    rollouts = two_prompts_in_turn(100)
    microbatch_of = [number // 4 for number in range(len(rollouts))]
    options = TreeOptions(segment_tokens=200, min_gain=0, share="batch")
    shared = find_shared(rollouts, None, options)
    forest = shared.forest(microbatch_of=microbatch_of)
    assert forest.executed_tokens == shared.forest().executed_tokens
    is_prefix_tree(forest)
    # Both prompts, and the questions and answers of a round and of what runs ahead for the next.
    assert live(forest, microbatch_of) <= 2 * 60 + 200 + 200


@given(rollout_sets(), tree_options(), st.integers(1, 4))
@settings(max_examples=rounds(40, 500))
def test_forests_of_any_microbatches_are_forests(sets, options, size):
    rollouts, groups = sets
    microbatch_of = [number // size for number in range(len(rollouts))]
    shared = find_shared(rollouts, groups, options)
    forest = shared.forest(microbatch_of=microbatch_of)
    is_prefix_tree(forest)
    for segment in forest.segments:  # spans with one parent are neighbours
        parents = [parent for parent, _ in itertools.groupby(s.parent for s in segment.spans)]
        assert len(parents) == len({*parents})
    for level in itertools.chain.from_iterable(payload_map(forest.segments).levels):
        rows = [row for run in level.runs for row in range(run.start, run.end)]
        assert len(rows) == len({*rows})  # so gK/gV can be written in one pass
    plan = best_plan(forest, microbatches=tuple(microbatch_of))
    simulate(plan, ready_after=loss_ready_after(forest, microbatch_of))
