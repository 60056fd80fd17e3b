"""Rows of a test, of which a run of the whole suite leaves some out.

Cases here are rows of axes: a layout, a memory policy, a model, a form of call. A row is marked
`products` where each of its values stands in a row that is not: what it adds is that they go
together. Every value of every axis, every pair that code asks for together, and every mistake that
is made on purpose stays. Among rows that show the same, the cheapest stays.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

EVERYTHING = "TEST_EVERYTHING"
"""Variable that tests/conftest.py sets where nothing is left out."""


def rows(every: Iterable[Any], products: Collection[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: a value or a tuple of values each.

    Raises:
        AssertionError: a product is no row.
    """
    found = [*every]
    assert all(one in found for one in products), products
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.products)
        if one in products
        else one
        for one in found
    ]


def through(every: Iterable[Any], products: Collection[Any]) -> list[Any]:
    """What a test goes through by itself: all of it, or what is no product.

    Raises:
        AssertionError: a product is not among them.
    """
    found = [*every]
    assert all(one in found for one in products), products
    return [one for one in found if EVERYTHING in os.environ or one not in products]
