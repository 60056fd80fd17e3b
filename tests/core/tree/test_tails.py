"""A window reads the last positions before a span, each row once, and rows that nobody else has."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.plan.planner import make_plan
from megatron_prefix.tree import Place, Segment, Span
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness.fuzzing import rounds
from tests.harness.trees import ancestors, random_forest

Key = tuple[Place, int]
"""A position of a span."""


def positions_of(segments: Sequence[Segment], place: Place) -> list[Key]:
    span = segments[place.segment].spans[place.number]
    return [(place, position) for position in range(span.padded)]


def check_program(
    segments: Sequence[Segment], program: Sequence[tuple[str, int]], form: Form
) -> None:
    """Runs a program over an arena of named rows."""
    rows, tails = payload_map(segments, program, forms=[form]).tails[form]
    arena: list[Key | None] = [None] * rows.length
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
        )  # type: ignore[index]
        for place, keys in zip(places, tails[index].spans, strict=True):
            above = [
                key for one in ancestors(segments, place) for key in positions_of(segments, one)
            ]
            found = [seen[at] for start, stop in keys for at in range(start, stop)]
            assert found == above[-(form.last or 0) :]
        if kind == "B" and mine is not None:
            arena[mine] = [None] * len(left)


@given(st.randoms(use_true_random=True), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=rounds(75, 500))
def test_queries_see_the_last_positions_before_them(
    rng: random.Random, window: int, num_ranks: int
) -> None:
    forest, form = random_forest(rng), Form("positions", window)
    plan = make_plan(forest, num_ranks)
    for rank in range(num_ranks):
        check_program(forest.segments, plan.actions_of(rank, 0), form)


def test_a_span_shorter_than_the_window() -> None:
    """Its children read the end of its parent, too; siblings read common rows once."""

    def segment(*spans: Span, inner: bool) -> Segment:
        return Segment(spans, inner, not inner)

    def span(start: int, length: int, parent: Place | None) -> Span:
        return Span(start, length, length, (0,), parent)

    root = segment(span(0, 10, None), inner=True)
    turn = segment(span(10, 3, Place(0, 0)), inner=True)
    ends = segment(span(13, 2, Place(1, 0)), span(13, 1, Place(1, 0)), span(10, 4, Place(0, 0)),
                   inner=False)  # fmt: skip
    form = Form("positions", 5)
    rows, tails = payload_map([root, turn, ends], forms=[form]).tails[form]
    assert rows.intervals == (slice(0, 5), slice(5, 8), None) and rows.length == 8
    assert tails[0] == ((), (), ((),))
    assert tails[1] == ((0,), ((0, 5),), (((0, 5),),))
    assert tails[2].rows == ((0, 5), (5, 8))
    assert tails[2].spans == (((3, 5), (5, 8)), ((3, 5), (5, 8)), ((0, 5),))
    check_program([root, turn, ends], [("F", 0), ("F", 1), ("F", 2)], form)
