"""What holds for every forest: coverage, alignment, chunks, waves, loss, and what is shared."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.errors import UserError
from megatron_prefix.lab.plans.forest import max_depth, trees
from megatron_prefix.tree import Pairs, Place, TreeOptions, build
from megatron_prefix.tree.forest import MOST_EXPERTS
from tests.harness.fuzzing import rounds
from tests.harness.trees import (
    as_pairs,
    exact,
    is_prefix_tree,
    received,
    rollout_sets,
    tree_options,
    trees_of,
    trie_size,
    with_routes,
)

# Invariants of every forest -----------------------------------------------------------------------


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(50, 500))
def test_shared_rows_hold_the_same_pairs_and_one_tree_each(sets, options) -> None:
    rollouts, groups = sets
    forest = build(rollouts, groups, options)
    tree_of_group: dict[int, int] = {}
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
def test_positions_are_shared_as_far_as_their_routes_agree(sets, options, data) -> None:
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
@settings(max_examples=rounds(50, 500))
def test_boundaries_are_aligned_and_inner_segments_unpadded(sets, options) -> None:
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
        for number in range(len(segment.spans)):
            assert segment.inner == (Place(index, number) in read)


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(50, 500))
def test_chunks_keep_the_limit_and_nothing_else_is_a_chain(sets, options) -> None:
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
@settings(max_examples=rounds(50, 500))
def test_scored_segments_reach_a_trained_position(sets, options) -> None:
    rollouts, groups = sets
    forest = build(rollouts, groups, options)
    for segment in forest.segments:
        reached = [
            span.end > rollouts[m].first_trained for span in segment.spans for m in span.rollouts
        ]
        assert segment.scored == any(reached)


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(75, 500))
def test_loss_in_leaves_shares_trained_positions_of_copies(sets, options) -> None:
    rollouts, groups = sets
    options = TreeOptions(**{**vars(options), "loss_in_leaves": True})
    forest = build(rollouts, groups, options)
    for segment in forest.segments:
        for span in segment.spans:
            if any(span.end > rollouts[member].first_trained for member in span.rollouts):
                assert not segment.inner
                assert len({rollouts[member].inputs.tobytes() for member in span.rollouts}) == 1


# What is shared -----------------------------------------------------------------------------------


@given(rollout_sets(), st.sampled_from([1, 1, 2, 3, 4, 8, 16]), st.sampled_from(["group", "batch"]))
@settings(max_examples=rounds(75, 500))
def test_executed_tokens_are_those_of_the_trie(sets, align, share) -> None:
    rollouts, groups = sets
    forest = build(rollouts, groups, exact(multiple=align, share=share))
    apart = trees_of(rollouts, groups, share)
    assert forest.executed_tokens == sum(trie_size(tree, align) for tree in apart)
    assert forest.raw_tokens == sum(map(len, rollouts))


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(50, 500))
def test_cutting_chunks_and_waves_changes_no_sharing(sets, options) -> None:
    uncut = TreeOptions(**{**vars(options), "chunk_tokens": 0, "segment_tokens": 0})
    assert build(*sets, options).executed_tokens == build(*sets, uncut).executed_tokens


@given(rollout_sets(), st.integers(0, 40), st.sampled_from([1, 2, 4]))
@settings(max_examples=rounds(50, 500))
def test_dissolving_leaves_only_segments_that_save_enough(sets, min_gain, align) -> None:
    rollouts, groups = sets
    forest = build(rollouts, groups, exact(min_gain=min_gain, multiple=align))
    least = build(rollouts, groups, exact(multiple=align)).executed_tokens
    # Copies share their leaf whatever the gain; nothing else may fall back to more than that.
    most = sum(len({(r.inputs.tobytes(), r.labels.tobytes()) for r in tree} and tree) and sum(
        len(one) for one in {(r.inputs.tobytes(), r.labels.tobytes()): r for r in tree}.values()
    ) for tree in trees_of(rollouts, groups, "group"))  # fmt: skip
    assert least <= forest.executed_tokens <= most
    below: dict[Place, list[int]] = {}  # rollouts of every child
    branches: Counter[Place] = Counter()
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
@settings(max_examples=rounds(50, 500))
def test_sharing_does_not_depend_on_the_order_of_rollouts(
    sets, options, rng: random.Random
) -> None:
    rollouts, groups = sets
    order = list(range(len(rollouts)))
    rng.shuffle(order)
    shuffled = build([rollouts[i] for i in order], [groups[i] for i in order], options)
    straight = build(rollouts, groups, options)
    assert shuffled.executed_tokens == straight.executed_tokens
    assert max_depth(shuffled) == max_depth(straight)
