"""Rows of the tables are few: none is there for nothing, and none that goes takes a pair along."""

import pytest

from tests import covering

PAIRS = 18_914
"""Pairs of values that were in a row when rows without one of their own went."""


@pytest.fixture(scope="module")
def rows():
    return [*covering.rows()]


def test_every_pair_of_values_is_still_in_a_row(rows):
    """Each value of each axis with it, as every pair has two."""
    assert covering.num_pairs(rows) >= PAIRS


def test_every_row_has_a_pair_that_no_other_has(rows):
    assert [*map(str, covering.superfluous(rows))] == []


def test_a_row_whose_pairs_others_have_is_seen(rows):
    first, *others = rows[:9]
    assert covering.superfluous([*others, first, first]) == [first]
    assert covering.num_pairs(others) < covering.num_pairs(rows)
