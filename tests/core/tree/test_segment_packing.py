"""Packing: which spans share a segment, how many segments there are, and what must be held."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.plans.forest import max_depth, num_trees
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.planner import best_plan, loss_ready_after
from megatron_prefix.tree import Forest, Pairs, Place, TreeOptions, build, find_shared
from megatron_prefix.tree.nodes import Node, even_parts
from megatron_prefix.tree.payload_map import payload_map
from tests.harness import data
from tests.harness.fuzzing import rounds
from tests.harness.trees import (
    ancestors,
    flat_rollouts,
    forest_of_nodes,
    is_prefix_tree,
    random_trees,
    rollout_sets,
    tree_options,
)

budgets = st.sampled_from([0, 1, 5, 20, 60, 200, 1000])
randoms = st.randoms(use_true_random=True)


def packed(rng: random.Random, budget: int) -> tuple[list[Node], Forest]:
    """Random trees and their forest."""
    roots, first = random_trees(rng, depth=rng.randint(1, 6))
    return roots, forest_of_nodes(roots, first, TreeOptions(segment_tokens=budget))


forests = st.one_of(
    st.builds(lambda sets, options: build(*sets, options), rollout_sets(), tree_options()),
    st.builds(lambda rng, budget: packed(rng, budget)[1], randoms, budgets),
)


@given(forests)
@settings(max_examples=rounds(75, 500))
def test_every_rollout_goes_through_one_span_a_position(forest) -> None:
    """And at most once through a segment, so none of its spans is an ancestor of another."""
    is_prefix_tree(forest)
    for index, segment in enumerate(forest.segments):
        places = [Place(index, number) for number in range(len(segment.spans))]
        above = {place for one in places for place in ancestors(forest.segments, one)}
        assert not any(place.segment == index for place in above)


@given(forests)
@settings(max_examples=rounds(75, 500))
def test_spans_below_one_span_are_neighbours(forest) -> None:
    """Those with one parent, and those with one ancestor at any level."""
    for index, segment in enumerate(forest.segments):
        paths = [ancestors(forest.segments, Place(index, n)) for n in range(len(segment.spans))]
        for depth in range(max(map(len, paths))):
            seen = [path[depth] if depth < len(path) else None for path in paths]
            runs = [place for place, _ in itertools.groupby(seen) if place is not None]
            assert len(set(runs)) == len(runs)


@given(forests)
@settings(max_examples=rounds(75, 500))
def test_waves_read_and_inner_segments_are_read(forest) -> None:
    read = {span.parent for segment in forest.segments for span in segment.spans}
    for index, segment in enumerate(forest.segments):
        for number in range(len(segment.spans)):
            assert (Place(index, number) in read) == segment.inner


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(75, 500))
def test_segments_keep_the_budget_unless_they_are_a_single_span(sets, options) -> None:
    for segment in build(*sets, options).segments:
        if len(segment.spans) > 1 and options.segment_tokens:
            assert segment.padded_length <= options.segment_tokens


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(50, 500))
def test_without_a_budget_one_segment_per_level_and_one_wave(sets, options) -> None:
    options = TreeOptions(**{**vars(options), "segment_tokens": 0})
    forest = build(*sets, options)
    segments = forest.segments
    depths = {
        Place(index, number): len(ancestors(segments, Place(index, number)))
        for index, segment in enumerate(segments)
        for number in range(len(segment.spans))
    }
    assert [segment.inner for segment in segments] == [True] * (len(segments) - 1) + [False]
    for place, depth in depths.items():
        if segments[place.segment].inner:
            assert depth == place.segment


@given(randoms, budgets.filter(bool))
@settings(max_examples=rounds(100, 500))
def test_there_are_few_segments(rng: random.Random, budget: int) -> None:
    """In about full ones, but for levels of trees: these run one by one, whenever waves come
    between."""
    _, forest = packed(rng, budget)
    kinds = [True, *(segment.inner for segment in forest.segments)]
    turns = sum(after and not before for before, after in itertools.pairwise([False, *kinds]))
    assert turns <= 1 + 4 * forest.executed_tokens / budget
    most = 4 * forest.executed_tokens / budget + 2 * (max_depth(forest) + 1) * turns
    assert len(forest.segments) <= most


@given(rollout_sets(), tree_options(), st.sampled_from([1, 5, 20, 100]))
@settings(max_examples=rounds(75, 500))
def test_inner_segments_save_at_least_the_gain_of_a_segment(sets, options, gain: int) -> None:
    plain = TreeOptions(**{**vars(options), "chunk_tokens": 0})
    forest = build(*sets, TreeOptions(**{**vars(plain), "segment_gain": gain}))
    is_prefix_tree(forest)
    read: Counter[Place | None] = Counter()
    carried: Counter[Place | None] = Counter()
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


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(0, 12))
@settings(max_examples=rounds(100, 500))
def test_even_parts_are_the_fewest_and_about_equal(lengths: list[int], budget: int) -> None:
    found = even_parts(lengths, budget)
    cuts = [0, *(stop for _, stop in found)]
    assert found == [*itertools.pairwise(cuts)] and cuts[-1] == len(lengths)

    def fits(bounds: Sequence[int]) -> bool:
        return all(
            not budget or b - a == 1 or sum(lengths[a:b]) <= budget
            for a, b in itertools.pairwise(bounds)
        )

    def longest(bounds: Sequence[int]) -> int:
        return max((sum(lengths[a:b]) for a, b in itertools.pairwise(bounds)), default=0)

    for num in range(len(lengths)):  # cuts within
        inside = itertools.combinations(range(1, len(lengths)), num)
        ways = [[0, *cut, len(lengths)] for cut in inside if fits([0, *cut, len(lengths)])]
        if ways:
            assert len(found) == num + 1 and fits(cuts)
            # Where one length alone is over the budget, the others need not be cut more evenly.
            best = min(map(longest, ways))
            assert longest(cuts) == best or max(lengths) > budget
            return
    assert not lengths


def test_a_step_that_shares_nothing_is_packed() -> None:
    lengths = [300, 500, 200, 700, 100, 900, 250, 50]
    rollouts = [
        Pairs(np.full(n, k), np.full(n, k), np.ones(n, bool)) for k, n in enumerate(lengths)
    ]
    forest = build(rollouts, range(len(lengths)), TreeOptions(segment_tokens=1000))
    assert [[span.length for span in s.spans] for s in forest.segments] == [
        [300, 500, 200], [700, 100], [900], [250, 50],
    ]  # fmt: skip
    assert not any(segment.inner or segment.parents for segment in forest.segments)


def test_small_prompts_run_together_and_large_ones_alone() -> None:
    small, _ = flat_rollouts(prefix=20, suffix=10, num=4, num_groups=2)
    large, _ = flat_rollouts(prefix=500, suffix=60, num=4, num_groups=1)
    groups = [0] * 4 + [1] * 4 + [2] * 4
    forest = build([*small, *large], groups, TreeOptions(min_gain=0, segment_tokens=100))
    assert [(s.inner, len(s.spans), s.padded_length) for s in forest.segments] == [
        (True, 2, 40), (False, 8, 80),
        (True, 1, 500), (False, 1, 60), (False, 1, 60), (False, 1, 60), (False, 1, 60),
    ]  # fmt: skip


def test_sixty_four_groups_of_gsm8k_are_at_most_twelve_segments() -> None:
    rollouts, numbers = pairs_of_groups(data.groups("gsm8k", 64))
    forest = build(rollouts, numbers, TreeOptions(segment_tokens=8192))
    assert num_trees(forest.segments) >= 60 and len(forest.segments) <= 12
    assert max(s.padded_length for s in forest.segments) <= 8192


# Microbatches -------------------------------------------------------------------------------------


def live(forest: Forest, microbatch_of: Sequence[int]) -> int:
    plan = best_plan(forest, microbatches=tuple(microbatch_of))
    return simulate(plan, ready_after=loss_ready_after(forest, microbatch_of)).peak_live_positions


def two_prompts_in_turn(num_groups: int) -> list[Pairs]:
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


def test_groups_over_many_microbatches_do_not_hold_all_leaves() -> None:
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


def test_a_microbatch_larger_than_a_segment_is_cut_evenly() -> None:
    rollouts, groups = flat_rollouts(prefix=50, suffix=30, num=14, num_groups=1)
    microbatch_of = [number // 7 for number in range(len(rollouts))]
    options = TreeOptions(min_gain=0, segment_tokens=100)
    forest = build(rollouts, groups, options, microbatch_of)
    assert [len(s.spans) for s in forest.segments] == [1, 3, 3, 1, 3, 3, 1]
    plan = best_plan(forest, microbatches=tuple(microbatch_of))
    assert [str(action) for action in plan.programs[0]] == (
        "F0 F1 F2 F3 B1 B2 B3 F4 F5 F6 B4 B5 B6 B0".split()
    )


def test_equal_rollouts_far_from_one_another_hold_up_no_other() -> None:
    """Their leaf waits for the last loss in a segment of its own, or runs again where it is
    short."""
    rollouts, _ = flat_rollouts(prefix=50, suffix=30, num=8, num_groups=1)
    rollouts.append(rollouts[0])
    options = TreeOptions(min_gain=0, segment_tokens=60)
    microbatch_of = [*range(8), 7]
    forest = build(rollouts, None, options, microbatch_of)
    assert forest.executed_tokens == 50 + 8 * 30
    assert forest.segments[1].spans[0].rollouts == (0, 8)
    assert live(forest, microbatch_of) == 50 + 30 + 60
    again = TreeOptions(min_gain=0, segment_tokens=60, segment_gain=31)
    assert build(rollouts, None, again, microbatch_of).executed_tokens == 50 + 9 * 30


def test_leaves_that_run_again_keep_their_parents() -> None:
    """Equal rollouts in many rounds, some below a prompt and some on their own."""
    below, _ = flat_rollouts(prefix=50, suffix=30, num=8, num_groups=1)
    alone = [as_whole(number) for number in range(8)]
    rollouts = [one for pair in zip(below, alone, strict=True) for one in pair] * 6
    options = TreeOptions(min_gain=0, segment_tokens=60, segment_gain=10**6)
    shared = find_shared(rollouts, None, TreeOptions(min_gain=0, segment_tokens=60))
    forest = replace(shared, options=options).forest()
    is_prefix_tree(forest)
    for segment in forest.segments:
        for span in segment.spans:
            assert (span.parent is None) == (span.start == 0)


def as_whole(number: int) -> Pairs:
    tokens = np.arange(31) + 10_000 * (number + 1)
    return Pairs(tokens[:-1], tokens[1:], np.ones(30, bool))


@given(rollout_sets(), tree_options(), st.integers(1, 4))
@settings(max_examples=rounds(75, 500))
def test_forests_of_any_microbatches_are_forests(sets, options, size: int) -> None:
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
