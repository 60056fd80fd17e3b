"""Arenas: rows of live segments never overlap, and queries see their ancestors' keys, each once."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.plan.planner import make_plan
from megatron_prefix.tree import Place, TreeOptions, build, cp_layout
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness.fuzzing import rounds
from tests.harness.trees import ancestors, flat_rollouts, random_forest, rollout_sets, tree_options


def keys_of(segments, place, parts):
    padded = segments[place.segment].spans[place.number].padded
    return [(place, row) for row in range(padded // parts)]


def seen_keys(levels, num, arena):
    """What every query sees; runs of a level go forward and have neither queries nor keys twice."""
    seen = [[] for _ in range(num)]
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


def check_segment(segments, index, found, arena, parts):
    """Every query sees the rows of its span's ancestors, root first, and nothing else; padding what
    is before it sees."""
    spans = segments[index].spans
    seen = iter(seen_keys(found.levels[index], segments[index].padded_length // parts, arena))
    read, above = set(), ()
    for number, span in enumerate(spans):
        above = ancestors(segments, Place(index, number)) if span.rollouts else above
        wanted = [key for place in above for key in keys_of(segments, place, parts)]
        assert all(next(seen) == wanted for _ in range(span.padded // parts))
        read.update(place.segment for place in above)
    assert found.positions.visible[index] == tuple(sorted(read))


def check_program(segments, program, parts=1):
    """Runs a program over an arena of named rows."""
    found = payload_map(segments, program, parts)
    arena = [None] * found.positions.length
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
@settings(max_examples=rounds(40, 500))
def test_live_rows_never_overlap_and_queries_see_their_ancestors(rng, num_ranks, num_chunks, ahead):
    forest = random_forest(rng)
    num_chunks = num_chunks if num_ranks > 1 else 1
    options = {"run_ahead": None if ahead else 1, "num_chunks": num_chunks}
    plan = make_plan(forest, num_ranks, **options)
    for rank, chunk in itertools.product(range(num_ranks), range(num_chunks)):
        check_program(forest.segments, plan.actions_of(rank, chunk))


@pytest.mark.parametrize("parts", [1, 2])
@given(sets=rollout_sets(), options=tree_options())
def test_context_parallel_ranks_hold_equal_parts(parts, sets, options):
    if options.multiple % parts:
        return
    segments = build(*sets, options).segments
    found = check_program(segments, [("F", index) for index in range(len(segments))], parts)
    assert found == payload_map(segments, parts=parts)
    rows = sum(segment.padded_length for segment in segments if segment.inner) // parts
    # Of a line only the longest end has its rows kept free, and it may come to lie elsewhere.
    assert rows <= found.positions.length <= 2 * rows


@pytest.mark.parametrize(("num", "padded"), [
    (3, [[14], [16], [15, 1], [11, 11, 12]]), (1, [[14], [14], [16], [12]]),
], ids=["a prompt", "a rollout up to its loss"])  # fmt: skip
def test_what_is_padded_in_its_last_chunk_is_one_block_of_keys(num, padded):
    rollouts, groups = flat_rollouts(prefix=45, suffix=11, num=num, num_groups=1)
    options = TreeOptions(
        min_gain=0, chunk_tokens=20, segment_tokens=40, even=64, loss_in_leaves=num == 1
    )
    segments = build(rollouts, groups, options).segments
    assert [[span.padded for span in segment.spans] for segment in segments] == padded
    found = check_program(segments, [("F", index) for index in range(len(segments))])
    assert [len(levels) for levels in found.levels] == [0, 1, 1, 1]


def test_freed_rows_are_used_again():
    """Per group three chunks of 3, 3 and 4 positions, and two waves; the groups apart."""
    options = TreeOptions(min_gain=0, chunk_tokens=4, segment_tokens=4)
    forest = build(*flat_rollouts(prefix=10, suffix=4, num=2, num_groups=5), options)
    found = payload_map(forest.segments, make_plan(forest).actions_of(0, 0))
    assert found.positions.length == 10
    assert found.positions.intervals == (slice(0, 3), slice(3, 6), slice(6, 10), None, None) * 5
    assert payload_map(forest.segments).positions.length == 50
    ahead = payload_map(forest.segments, make_plan(forest, 2).actions_of(0, 0))
    assert 10 < ahead.positions.length < 50


# A window reads the last positions before a span, each row once, and rows that nobody else has ----


def positions_of(segments, place):
    span = segments[place.segment].spans[place.number]
    return [(place, position) for position in range(span.padded)]


def check_tails(segments, program, form):
    """Runs a program over an arena of named rows."""
    rows, tails = payload_map(segments, program, forms=[form]).tails[form]
    arena = [None] * rows.length
    for kind, index in program:
        mine = rows.intervals[index]
        places = [Place(index, number) for number in range(len(segments[index].spans))]
        left = [
            key
            for place in places
            for key in positions_of(segments, place)[
                -form.rows(len(positions_of(segments, place))) :
            ]
        ]
        if kind == "F" and mine is not None:
            assert arena[mine] == [None] * len(left)  # free, and within the arena
            arena[mine] = left
        read = [row for start, end in tails[index].rows for row in range(start, end)]
        assert len({*read}) == len(read)
        seen = [arena[row] for row in read]
        assert (
            tails[index].visible
            == rows.visible[index]
            == tuple(sorted({k[0].segment for k in seen}))
        )
        for place, keys in zip(places, tails[index].spans, strict=True):
            above = [
                key for one in ancestors(segments, place) for key in positions_of(segments, one)
            ]
            found = [seen[at] for start, stop in keys for at in range(start, stop)]
            assert found == above[-(form.last or 0) :]
        if kind == "B" and mine is not None:
            arena[mine] = [None] * len(left)


@given(st.randoms(use_true_random=True), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=rounds(40, 500))
def test_queries_see_the_last_positions_before_them(rng, window, num_ranks):
    forest, form = random_forest(rng), Form("positions", window)
    plan = make_plan(forest, num_ranks)
    for rank in range(num_ranks):
        check_tails(forest.segments, plan.actions_of(rank, 0), form)


# Context parallelism: which rows of a segment each rank holds, and what they see ------------------


@st.composite
def segments(draw):
    """Lengths of a segment's rows, and the number of ranks."""
    size = draw(st.integers(2, 5))
    chunks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return tuple(2 * size * chunk for chunk in chunks), size


@pytest.mark.parametrize("length", [6, 10, 2])
def test_a_row_that_cannot_be_cut_is_refused(length):
    with pytest.raises(ValueError, match=f"{length} positions .* multiple of 4"):
        cp_layout.rank_positions(length, 0, 2)


@given(segments())
def test_every_row_is_held_once_and_the_order_is_found_again(case):
    lengths, size = case
    held = [cp_layout.held_positions(lengths, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(held)) == list(range(sum(lengths)))
    assert len({len(rows) for rows in held}) == 1
    assert np.array_equal(np.concatenate(held), cp_layout.view_positions(lengths, size))
    in_order = np.concatenate(held)[cp_layout.view_order(lengths, size)]
    assert in_order.tolist() == list(range(sum(lengths)))


def times_seen(lengths, rank, size):
    """How many runs show a query of this rank a key of the segment, [queries, keys]."""
    seen = np.zeros((sum(lengths) // size, sum(lengths)), int)
    runs = cp_layout.own_runs(lengths, rank, size)
    start = first = 0
    for num, num_keys in zip(runs.queries, runs.keys, strict=True):
        keys = runs.visible[first : first + num_keys]
        seen[start : start + num, keys] += np.tri(num, num_keys, num_keys - num, dtype=int)
        start, first = start + num, first + num_keys
    assert first == len(runs.visible)
    return seen


@given(segments())
def test_a_query_sees_its_rows_past_once_and_nothing_else(case):
    lengths, size = case
    row = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(sum(lengths))
    wanted = (row[:, None] == row) & (position[:, None] >= position)
    work = set()
    for rank in range(size):
        mine = cp_layout.held_positions(lengths, rank, size)
        seen = times_seen(lengths, rank, size)
        assert np.array_equal(seen, wanted[mine].astype(int)), f"rank {rank}"
        work.add(int(seen.sum()))
    assert len(work) == 1, "every rank has the same work"
