"""Keys in front of a segment's own: which levels of ancestors, and for which spans."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.tree.fronts import MOST_COPIES, front_of
from megatron_prefix.tree.payload_map import Level, Run, payload_map
from megatron_prefix.tree.views import PIECE_KEYS
from tests.harness.fuzzing import rounds
from tests.harness.trees import random_forest

SHORT, LONG = Level((Run(0, 4, 30, 31), Run(4, 8, 35, 36))), Level((Run(0, 8, 0, 5),))


@pytest.mark.parametrize(("levels", "in_front", "rows", "spans"), [
    ([], None, None, None),
    ([LONG], None, None, None),  # 2 spans of 8 positions: 10 copies
    ([LONG, SHORT], (1,), ((30, 31), (35, 36)), (((0, 1),), ((1, 2),))),
    ([SHORT, Level((Run(0, 8, 7, 10),))], (0, 1), ((30, 31), (35, 36), (7, 10)),
     (((0, 1), (2, 5)), ((1, 2), (2, 5)))),
])  # fmt: skip
def test_short_levels_are_in_front(levels, in_front, rows, spans):
    front = front_of(levels, [4, 4])
    assert front == (None if in_front is None else (in_front, rows, spans))


def test_copies_are_few_however_long_a_segment_is():
    """Their gradients are in memory all at once."""
    longest = Level((Run(0, 2 * PIECE_KEYS, 0, PIECE_KEYS),))
    assert front_of([longest], [2 * PIECE_KEYS]) is not None
    assert front_of([longest, longest], [2 * PIECE_KEYS]).levels == (0,)


@given(st.randoms(use_true_random=True))
@settings(max_examples=rounds(40, 500))
def test_every_span_has_copies_of_what_it_sees_in_these_levels(rng):
    planned = payload_map(random_forest(rng).segments)
    for levels, lengths in zip(planned.levels, planned.lengths, strict=True):
        front = front_of(levels, lengths)
        if front is None:
            continue
        read = [row for bounds in front.rows for row in range(*bounds)]
        num_copies = 0
        for start, above in zip(
            itertools.accumulate(lengths, initial=0), front.spans, strict=False
        ):
            copies = [row for bounds in above for row in read[slice(*bounds)]]
            apart = [
                run for n, level in enumerate(levels) for run in level.runs if n in front.levels
            ]
            seen = (run for run in apart if run.first <= start < run.stop)
            assert copies == [row for run in seen for row in range(run.start, run.end)]
            num_copies += len(copies)
        assert num_copies <= MOST_COPIES * sum(lengths)
