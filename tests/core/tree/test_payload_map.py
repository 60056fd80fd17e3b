"""Arenas: rows of live segments never overlap, and queries see their ancestors' keys, each once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.plan.planner import make_plan
from megatron_prefix.tree import Forest, Pairs, Place, Segment, Span, TreeOptions, build
from megatron_prefix.tree import payload_map as module
from megatron_prefix.tree.payload_map import Level, PayloadMap, RowMap, Run, payload_map
from tests.harness.fuzzing import rounds
from tests.harness.trees import (
    ancestors,
    flat_rollouts,
    random_forest,
    rollout_sets,
    tree_options,
)

Key = tuple[Place, int]
"""A key of a span: its place, and its number on this rank."""


def keys_of(segments: Sequence[Segment], place: Place, parts: int) -> list[Key]:
    padded = segments[place.segment].spans[place.number].padded
    return [(place, row) for row in range(padded // parts)]


def seen_keys(levels: Sequence[Level], num: int, arena: list[Key | None]) -> list[list[Key | None]]:
    """What every query sees; runs of a level go forward and have neither queries nor keys twice."""
    seen: list[list[Key | None]] = [[] for _ in range(num)]
    for level in levels:
        assert level.runs
        assert all(run.first < run.stop <= num and run.start < run.end for run in level.runs)
        assert level.queries == tuple(run.stop - run.first for run in level.runs)
        assert level.keys == tuple(run.end - run.start for run in level.runs)
        assert all(a.stop <= b.first for a, b in itertools.pairwise(level.runs))
        by_keys = sorted(level.runs, key=lambda run: run.start)
        assert all(a.end <= b.start for a, b in itertools.pairwise(by_keys))
        rows = [row for run in level.runs for row in range(run.start, run.end)]
        one = [*range(rows[0], rows[0] + len(rows))] == rows
        assert level.rows == (slice(rows[0], rows[-1] + 1) if one else None)
        for run in level.runs:
            for query in range(run.first, run.stop):
                seen[query] += arena[run.start : run.end]
    return seen


def check_segment(
    segments: Sequence[Segment], index: int, found: PayloadMap, arena: list[Key | None], parts: int
) -> None:
    """Every query sees the rows of its span's ancestors, root first, and nothing else."""
    spans = segments[index].spans
    seen = iter(seen_keys(found.levels[index], segments[index].padded_length // parts, arena))
    read = set()
    for number, span in enumerate(spans):
        above = ancestors(segments, Place(index, number))
        wanted = [key for place in above for key in keys_of(segments, place, parts)]
        assert all(next(seen) == wanted for _ in range(span.padded // parts))
        read.update(place.segment for place in above)
    assert found.positions.visible[index] == tuple(sorted(read))


def check_program(
    segments: Sequence[Segment], program: Sequence[tuple[str, int]], parts: int = 1
) -> PayloadMap:
    """Runs a program over an arena of named rows."""
    found = payload_map(segments, program, parts)
    arena: list[Key | None] = [None] * found.positions.length
    for kind, index in program:
        rows = found.positions.intervals[index]
        assert (rows is not None) == segments[index].inner
        if kind == "F" and rows is not None:
            spans = range(len(segments[index].spans))
            keys = [k for n in spans for k in keys_of(segments, Place(index, n), parts)]
            assert arena[rows] == [None] * len(keys)  # free, and within the arena
            arena[rows] = keys
        check_segment(segments, index, found, arena, parts)
        if kind == "B" and rows is not None:
            arena[rows] = [None] * (rows.stop - rows.start)
    return found


@given(st.randoms(use_true_random=True), st.integers(1, 4), st.integers(1, 2), st.booleans())
@settings(max_examples=rounds(75, 500))
def test_live_rows_never_overlap_and_queries_see_their_ancestors(
    rng: random.Random, num_ranks: int, num_chunks: int, ahead: bool
) -> None:
    forest = random_forest(rng)
    num_chunks = num_chunks if num_ranks > 1 else 1
    options = {"run_ahead": None if ahead else 1, "num_chunks": num_chunks}
    plan = make_plan(forest, num_ranks, **options)
    for rank, chunk in itertools.product(range(num_ranks), range(num_chunks)):
        check_program(forest.segments, plan.actions_of(rank, chunk))


@pytest.mark.parametrize("parts", [1, 2])
@given(sets=rollout_sets(), options=tree_options())
def test_context_parallel_ranks_hold_equal_parts(
    parts: int, sets: tuple[list[Pairs], list[int]], options: TreeOptions
) -> None:
    if options.multiple % parts:
        return
    segments = build(*sets, options).segments
    found = check_program(segments, [("F", index) for index in range(len(segments))], parts)
    assert found == payload_map(segments, parts=parts)
    rows = sum(segment.padded_length for segment in segments if segment.inner) // parts
    # Of a line only the longest end has its rows kept free, and it may come to lie elsewhere.
    assert rows <= found.positions.length <= 2 * rows


@given(st.randoms(use_true_random=True), st.integers(1, 9))
@settings(max_examples=rounds(30, 500))
def test_long_blocks_that_all_queries_see_are_cut(rng: random.Random, longest: int) -> None:
    forest = random_forest(rng)
    program = make_plan(forest).actions_of(0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_KEYS", longest)
        check_program(forest.segments, program)
        found = payload_map(forest.segments, program)
    for segment, levels in zip(forest.segments, found.levels, strict=True):
        if len({span.parent for span in segment.spans}) == 1:
            assert all(len(level.runs) == 1 and max(level.keys) <= longest for level in levels)


def chained(chunk_tokens: int = 4, num_groups: int = 2) -> Forest:
    """Per group three chunks of 3, 3 and 4 positions, and a wave; the groups apart."""
    rollouts, groups = flat_rollouts(prefix=10, suffix=4, num=2, num_groups=num_groups)
    options = TreeOptions(min_gain=0, chunk_tokens=chunk_tokens, segment_tokens=4)
    return build(rollouts, groups, options)


def test_chunks_of_a_chain_are_one_level() -> None:
    forest = chained()
    assert [segment.padded_length for segment in forest.segments] == [3, 3, 4, 4, 4] * 2
    program = [("F", index) for index in range(5)] + [("B", index) for index in (3, 4, 2, 1, 0)]
    found = payload_map(forest.segments[:5], program)
    assert found.positions.intervals == (slice(0, 3), slice(3, 6), slice(6, 10), None, None)
    levels = [(), (0, 3, 0, 3), (0, 4, 0, 6), (0, 4, 0, 10), (0, 4, 0, 10)]
    assert found.levels == tuple((Level((Run(*run),)),) if run else () for run in levels)
    assert found.positions.visible == ((), (0,), (0, 1), (0, 1, 2), (0, 1, 2))


def test_freed_rows_are_used_again() -> None:
    forest = chained(num_groups=5)
    found = payload_map(forest.segments, make_plan(forest).actions_of(0, 0))
    assert found.positions.length == 10
    assert found.positions.intervals == (slice(0, 3), slice(3, 6), slice(6, 10), None, None) * 5
    assert payload_map(forest.segments).positions.length == 50
    ahead = payload_map(forest.segments, make_plan(forest, 2).actions_of(0, 0))
    assert 10 < ahead.positions.length < 50


def test_a_chain_stays_one_block_while_another_group_begins() -> None:
    """Rows for a whole line are kept free behind its first segment."""
    segments = chained().segments
    program = [("F", index) for index in (0, 5, 1, 6, 2, 7)]
    found = payload_map(segments, program)
    assert found.positions.intervals[0:3] == (slice(0, 3), slice(3, 6), slice(6, 10))
    assert found.positions.intervals[5:8] == (slice(10, 13), slice(13, 16), slice(16, 20))


def test_a_branch_sees_the_part_of_a_chain_above_it() -> None:
    def segment(parent: int, length: int, *, inner: bool) -> Segment:
        place = Place(parent, 0) if parent >= 0 else None
        return Segment((Span(0, length, length, (0,), place),), inner, not inner)

    chain = [segment(-1, 4, inner=True), segment(0, 2, inner=True)]
    below = [segment(1, 3, inner=True), segment(2, 1, inner=False), segment(1, 1, inner=False)]
    second = [segment(1, 5, inner=True), segment(5, 1, inner=False)]
    found = check_program([*chain, *below, *second], [("F", index) for index in range(7)])
    assert found.positions.intervals[:3] == (slice(0, 4), slice(4, 6), slice(6, 9))
    assert found.levels[3] == (Level((Run(0, 1, 0, 9),)),)
    assert found.levels[4] == (Level((Run(0, 1, 0, 6),)),)
    # Both branches cannot lie behind the chain at once.
    start = found.positions.intervals[5].start
    assert found.levels[6] == (Level((Run(0, 1, 0, 6),)), Level((Run(0, 1, start, start + 5),)))
    apart = [*(("F", i) for i in range(5)), ("B", 3), ("B", 2), ("F", 5), ("F", 6)]
    found = check_program([*chain, *below, *second], apart)
    assert found.positions.intervals[5] == slice(6, 11) and found.positions.length == 11


def test_a_wave_of_two_trees_has_a_run_for_each() -> None:
    rollouts, groups = flat_rollouts(prefix=5, suffix=2, num=3, num_groups=2)
    forest = build(rollouts, groups, TreeOptions(min_gain=0, segment_tokens=0))
    assert [len(segment.spans) for segment in forest.segments] == [2, 6]
    found = payload_map(forest.segments)
    assert found.levels == ((), (Level((Run(0, 6, 0, 5), Run(6, 12, 5, 10))),))
    assert found.levels[1][0].rows == slice(0, 10)


def test_nothing_shared_needs_no_rows() -> None:
    forest = build([Pairs(np.arange(5), np.arange(5), np.ones(5, bool))])
    nothing = RowMap(0, (None,), ((),)), RowMap(1, (None,), ((),), 1)
    assert payload_map(forest.segments) == PayloadMap(*nothing, ((),), ((0,),), ((5,),))
