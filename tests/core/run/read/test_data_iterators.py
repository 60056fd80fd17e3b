"""Data iterators: what is drawn from them is told, and can be drawn twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.run.read.data_iterators import RepeatedIterators, observed, single


class Source(Iterator[Any]):
    """A trainer's, with an attribute and a method."""

    name = "source"

    def __init__(self, items: list[Any]) -> None:
        self._items = iter(items)

    def __next__(self) -> Any:
        return next(self._items)

    def peek(self) -> None:
        """It might draw."""


def batches() -> list[dict[str, torch.Tensor]]:
    return [{"tokens": torch.full((2,), number)} for number in range(4)]


def drawn(iterator: Any, num: int) -> list[list[int]]:
    return [batch["tokens"].tolist() for batch in islice(iterator, num)]


def test_what_is_drawn_is_told() -> None:
    items: list[Any] = []
    without_next = SimpleNamespace(place=0)
    first, second = observed([Source([1, 2, 3]), without_next], items.append)
    assert second is without_next
    assert (next(first), next(first), first.name) == (1, 2, "source")
    assert items == [1, 2]
    assert single(items) is None and single(items[:1]) == 1 and single([]) is None


@pytest.mark.parametrize("copies", [False, True])
def test_the_same_is_drawn_again_and_then_the_rest(copies: bool) -> None:
    source = Source(batches())
    iterators = RepeatedIterators([source, source], copies=copies)
    first, same = iterators.first
    assert first is same and first.name == "source"
    assert drawn(first, 2) == [[0, 0], [1, 1]]
    again, _ = iterators.again()
    assert drawn(again, 9) == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert not iterators.problem


def test_a_batch_that_loses_items_has_them_again() -> None:
    iterators = RepeatedIterators(Source(batches()))
    next(iterators.first).pop("tokens")
    assert drawn(iterators.again(), 1) == [[0, 0]]


@pytest.mark.parametrize("copies", [False, True])
def test_tensors_that_are_written_to(copies: bool) -> None:
    iterators = RepeatedIterators(Source(batches()), copies=copies)
    next(iterators.first)["tokens"].add_(7)
    if copies:
        assert drawn(iterators.again(), 1) == [[0, 0]]
    else:
        with pytest.raises(UserError, match="write into tensors that they have drawn"):
            iterators.again()


@pytest.mark.parametrize("copies", [False, True])
def test_an_object_that_counts_begins_anew(copies: bool) -> None:
    source = SimpleNamespace(place=0)
    iterators = RepeatedIterators(source, copies=copies)
    iterators.first.place += 3
    assert source.place == (0 if copies else 3)
    assert iterators.again() is source and source.place == 0


def test_an_object_that_holds_a_generator_begins_anew() -> None:
    """And when the call is over it holds its own."""
    inside = (batch for batch in batches())
    source = SimpleNamespace(items=inside, place=0)
    iterators = RepeatedIterators(source)
    assert drawn(iterators.first.items, 2) == [[0, 0], [1, 1]]
    assert drawn(iterators.again().items, 3) == [[0, 0], [1, 1], [2, 2]]
    iterators.close()
    assert source.items is inside and drawn(inside, 9) == [[3, 3]]


def test_iterators_of_a_trainers_own_inside_an_object_stay() -> None:
    inside = Source(batches())
    source = SimpleNamespace(items=inside)
    assert RepeatedIterators(source).first.items is inside


def test_what_cannot_be_drawn_twice_is_a_problem() -> None:
    iterators = RepeatedIterators(Source([(_ for _ in ())]), copies=True)
    next(iterators.first)
    assert "generator cannot be copied" in iterators.problem
    iterators = RepeatedIterators(Source([1]), copies=True)
    iterators.first.peek()
    assert iterators.problem == "the data iterator is asked for peek"
