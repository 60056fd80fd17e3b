"""Python's collector of cycles waits while a step is read and planned, and is as before then."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_prefix.run.planning import uncollected


@contextmanager
def collections() -> Iterator[list[int]]:
    """The generations that are collected meanwhile."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def make_garbage() -> list[list[int]]:
    return [[number] for number in range(10_000)]


def test_nothing_is_collected_meanwhile_and_afterwards_it_goes_on() -> None:
    assert gc.isenabled()
    with collections() as found:
        with uncollected():
            made = make_garbage()
            assert not found
        made += make_garbage()
        assert found


def test_an_exception_leaves_it_on() -> None:
    with pytest.raises(ValueError, match="stop"), uncollected():
        raise ValueError("stop")
    assert gc.isenabled()


def test_a_trainer_that_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
