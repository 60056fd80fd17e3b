"""Context parallelism: which rows of a segment each rank holds, and what they see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.features.context_parallel import places
from megatron_prefix.tree import cp_layout


@st.composite
def segments(draw: Any) -> tuple[tuple[int, ...], int]:
    """Lengths of a segment's rows, and the number of ranks."""
    size = draw(st.integers(2, 5))
    chunks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return tuple(2 * size * chunk for chunk in chunks), size


# Who holds what -----------------------------------------------------------------------------------


def test_positions_of_a_row() -> None:
    assert cp_layout.rank_positions(12, 0, 2).tolist() == [0, 1, 2, 9, 10, 11]
    assert cp_layout.rank_positions(12, 1, 2).tolist() == [3, 4, 5, 6, 7, 8]
    assert cp_layout.rank_positions(5, 0, 1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("length", [6, 10, 2])
def test_a_row_that_cannot_be_cut_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} positions .* multiple of 4"):
        cp_layout.rank_positions(length, 0, 2)


@given(segments())
def test_every_row_is_held_once_and_the_order_is_found_again(case: Any) -> None:
    lengths, size = case
    held = [cp_layout.held_positions(lengths, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(held)) == list(range(sum(lengths)))
    assert len({len(rows) for rows in held}) == 1
    assert np.array_equal(np.concatenate(held), cp_layout.view_positions(lengths, size))
    in_order = np.concatenate(held)[cp_layout.view_order(lengths, size)]
    assert in_order.tolist() == list(range(sum(lengths)))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 5), st.randoms())
def test_runs_are_found_in_the_view(parts: list[int], size: int, random: Any) -> None:
    """By hand: every rank gives its part of all runs; the runs' keys come in a run each."""
    names = [[(run, i) for i in range(size * num)] for run, num in enumerate(parts)]
    dealt = []  # per run the ranks' equal parts, whoever has which key
    for run in names:
        shuffled = random.sample(run, len(run))
        dealt.append([shuffled[rank::size] for rank in range(size)])
    view = [key for rank in range(size) for run in dealt for key in run[rank]]
    order = places.runs_in_view(tuple(len(run) for run in names), 0, size)
    assert sorted(order.tolist()) == list(range(len(view)))
    found = [view[place] for place in order]
    for run, mine in zip(names, dealt, strict=True):
        assert found[: len(run)] == [key for part in mine for key in part]
        assert sorted(found[: len(run)]) == run
        found = found[len(run) :]
    assert not found


def test_no_rows_at_all() -> None:
    assert cp_layout.held_positions([], 0, 2).tolist() == []


# What is seen -------------------------------------------------------------------------------------


def times_seen(lengths: tuple[int, ...], rank: int, size: int) -> np.ndarray:
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
def test_a_query_sees_its_rows_past_once_and_nothing_else(case: Any) -> None:
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


def test_a_single_rank_has_a_run_a_span() -> None:
    runs = cp_layout.own_runs((5, 8), 0, 1)
    assert runs.queries == runs.keys == (5, 8) and runs.visible.tolist() == list(range(13))
