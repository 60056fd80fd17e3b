"""Peaks of memory that were seen, beside those that were predicted.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Peaks(NamedTuple):
    """What the allocator of a device says, in bytes.

    Attributes:
        used: allocated now.
        allocated, reserved: the most so far.
    """

    used: float
    allocated: float
    reserved: float


class Seen(NamedTuple):
    """Peaks of a schedule's steps over the predicted ones, besides what was there before a step;
    0 where none was seen.

    Attributes:
        allocated: by tensors.
        reserved: by the allocator.
    """

    allocated: float = 0.0
    reserved: float = 0.0

    @classmethod
    def of_step(cls, before: Peaks, after: Peaks, predicted: float) -> Seen:
        """Of one step. Nobody resets the counters, so only a new maximum tells.

        Args:
            before, after: the step.
            predicted: bytes besides weights and gradients; 0: nothing was.
        """
        if not predicted:
            return cls()
        pairs = (before.allocated, after.allocated), (before.reserved, after.reserved)
        return cls(*((new - before.used) / predicted * (new > old) for old, new in pairs))

    @classmethod
    def most(cls, several: Iterable[Seen]) -> Seen:
        """Of the rank that has most of each."""
        return cls(*map(max, zip(*several, strict=True)))

    def then(self, later: Seen) -> Seen:
        """With a later step's."""
        return Seen(*(new or old for old, new in zip(self, later, strict=True)))


def factors(stock: Seen, ours: Seen) -> tuple[float, float]:
    """By what predictions are multiplied, of the stock schedule and of ours.

    What is wrong with the prediction of one is thought to be wrong with that of the other until
    that was seen, too. Where our steps reserve more of the device than they allocate, compared
    with the stock schedule, that counts as if it were allocated.
    """
    by_stock = stock.allocated or ours.allocated or 1.0
    by_ours = ours.allocated or by_stock
    if stock.reserved and ours.reserved:
        by_ours = max(by_ours, by_stock * ours.reserved / stock.reserved)
    return by_stock, by_ours
