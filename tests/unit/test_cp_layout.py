"""Context parallelism: which rows of a segment each rank holds, and what they see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.tree import cp_layout


@st.composite
def segments(draw: Any) -> tuple[tuple[int, ...], int]:
    """Lengths of a segment's rows, and the number of ranks."""
    size = draw(st.integers(2, 5))
    chunks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return tuple(2 * size * chunk for chunk in chunks), size


# Who holds what -----------------------------------------------------------------------------------


def test_positions_of_a_row() -> None:
    assert cp_layout.positions(12, 0, 2).tolist() == [0, 1, 2, 9, 10, 11]
    assert cp_layout.positions(12, 1, 2).tolist() == [3, 4, 5, 6, 7, 8]
    assert cp_layout.positions(5, 0, 1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("length", [6, 10, 2])
def test_a_row_that_cannot_be_cut_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} positions .* multiple of 4"):
        cp_layout.positions(length, 0, 2)


@given(segments())
def test_every_row_is_held_once_and_the_order_is_found_again(case: Any) -> None:
    lengths, size = case
    held = [cp_layout.held_positions(lengths, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(held)) == list(range(sum(lengths)))
    assert len({len(rows) for rows in held}) == 1
    in_order = np.concatenate(held)[cp_layout.order(lengths, size)]
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
    order = cp_layout.runs_in_view([len(run) for run in names], size)
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
    """How many blocks show a query of this rank a key of the segment, [queries, keys]."""
    local = sum(lengths) // size
    seen = np.zeros((local, sum(lengths)), int)  # keys in the order of the view
    blocks = cp_layout.own_blocks(lengths, rank, size)
    start = 0
    for chunk in blocks.pieces:
        keys = rank * local + start
        seen[start : start + chunk, keys : keys + chunk] += np.tri(chunk, dtype=int)
        start += chunk
    for block in blocks.paired:
        queries = np.split(block.queries, np.cumsum(block.query_lengths))
        keys_of = np.split(block.keys, np.cumsum(block.key_lengths))
        for mine, keys in zip(queries, keys_of, strict=True):
            seen[np.ix_(mine, keys)] += 1
    return seen[:, cp_layout.order(lengths, size)]


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


def test_few_blocks() -> None:
    """Equal rows are one batch; the first rank has nothing that both its chunks see."""
    assert [len(cp_layout.own_blocks((8, 8, 8), rank, 2).paired) for rank in (0, 1)] == [1, 2]
