"""Python's collector of cycles waits for the first action of a step, and is as before then."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.rl.step_parts import watching
from megatron_prefix.run.schedule import PrefixSchedule, uncollected
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model


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


def test_nothing_is_collected_meanwhile() -> None:
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


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_it_waits_for_the_first_action_only(mode: str) -> None:
    """In a step that the stock schedule runs it does not wait at all."""
    begun, called = [], []

    def watch(_: Any) -> Any:
        begun.append(gc.isenabled())
        return nullcontext()

    def answered(*_: Any) -> None:
        called.append(gc.isenabled())

    with one_rank():
        schedule = PrefixSchedule(PrefixConfig(mode=mode, min_gain=0, min_speedup=1e9))
        model = small_model()
        hook = model.register_forward_hook(answered)
        with watching(schedule, watch):
            steps.call(schedule, steps.Contract().step, model, steps.group(3, 3))
        hook.remove()
    assert begun == ([False] + [True] * (len(begun) - 1) if mode == "on" else [])
    assert len(begun) > 1 or (called and all(called))
    assert gc.isenabled()
