"""Finds the longest sequence that trains: by bisection, first predicted, then run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.device.memory import free_bytes
from megatron_prefix.lab.bench.memory import Way, measure, predicted, recomputing
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.verify.align import turned_on

LONGEST = 10**7
"""No longer sequence is looked for, whatever the capacity."""


@dataclass(frozen=True)
class Frontier:
    """The longest sequence that trains one way.

    Attributes:
        way: how it runs.
        predicted: tokens, by the memory model.
        trained: the longest that was run and trained; None if nothing was run.
        failed: the shortest that was run and failed; None if none failed.
    """

    way: str
    predicted: int
    trained: int | None = None
    failed: int | None = None


def frontier(
    response: int,
    way: Way,
    chunks: list[Any],
    config: PrefixConfig,
    *,
    capacity: float,
    step: int,
    num_tries: int,
    seed: int,
) -> Frontier:
    """The longest prompt for a response, by bisection: first predicted, then run.

    Args:
        response: tokens of each response, every one a wave.
        way: how to run.
        chunks: the model, wrapped in DDP.
        config: of the prefix schedule.
        capacity: bytes besides weights and gradients; 0: what the device has.
        step: lengths are multiples of it.
        num_tries: steps to run; 0: only predict.
        seed: of tokens.
    """
    device = next(chunks[0].parameters()).device
    capacity = capacity or free_bytes(device)
    config = turned_on(config, segment_tokens=1, min_gain=0)

    def shape(steps: int) -> GroupShape:
        return GroupShape(max(1, steps * step - response), response, 2)

    def fits(steps: int) -> bool:
        if steps * step > LONGEST:
            return False
        return predicted(shape(steps), way, chunks, config).peak <= capacity

    def trains(steps: int) -> bool:
        row = measure(shape(steps), way, chunks, config, repeats=0, seed=seed)
        return not row.problem

    with recomputing(chunks, way.recompute):
        last = _last(fits)
    good, bad = _around(last, trains, num_tries)
    return Frontier(str(way), last * step, good * step or None, bad * step or None)


def _last(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 for none: by doubling, then bisection."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _around(first: int, trains: Callable[[int], bool], num_tries: int) -> tuple[int, int]:
    """The largest number that was run and trains, and the smallest that does not; 0 for none."""
    good = bad = 0
    number = max(1, first)
    for _ in range(num_tries):
        good, bad = (number, bad) if trains(number) else (good, number)
        aim = (good + bad) / 2 if good and bad else 1.06 * good if good else 0.94 * bad
        number = max(1, round(aim))
        if number in (good, bad):
            break
    return good, bad
