"""Keys of short ancestors in front of a segment's own, for one causal call (tree/fronts.py).

What is copied is read once, and the gradients of copies are summed before they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.sidecar.arena import KeyValue, OwnKeys, Reading, summed
from megatron_prefix.sidecar.cache import as_rows
from megatron_prefix.tree.fronts import Front

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext


class FrontKeys(NamedTuple):
    """Keys of one call over a segment's own and those in front of them.

    Attributes:
        levels: that the call takes the place of.
        reading: the ancestors' rows.
        runs: of the queries.
        order: of every key its place in [ancestors' keys, own keys], int64 [keys].
        own: where own keys are among the keys, int64 [positions].
        copies: where copies are, those of one ancestor's key side by side, int64 [copies].
        numbers: copies of each of these keys, int64; None: one of each.
    """

    levels: tuple[int, ...]
    reading: Reading
    runs: Runs
    order: Tensor
    own: Tensor
    copies: Tensor
    numbers: Tensor | None

    @classmethod
    def of(cls, front: Front, lengths: Sequence[int], device: torch.device) -> FrontKeys:
        """Of spans of these lengths."""
        num_read = sum(stop - start for start, stop in front.rows)
        intervals, keys = list[tuple[int, int]](), list[int]()
        end = num_read
        for above, length in zip(front.spans, lengths, strict=True):
            intervals += [*above, (end, end + length)]
            keys.append(length + sum(stop - start for start, stop in above))
            end += length
        places = _ranges(np.array(intervals))
        own, copies = np.flatnonzero(places >= num_read), np.flatnonzero(places < num_read)
        copies = copies[np.argsort(places[copies], kind="stable")]
        parts = places, own, copies, np.bincount(places[copies], minlength=num_read)
        on_device = to_device(device, np.concatenate(parts)).split([*map(len, parts)])
        order, of_own, of_copies, numbers = on_device
        reading = Reading(as_rows(device, front.rows))
        runs = Runs(tuple(lengths), tuple(keys), causal=True)
        several = None if len(copies) == num_read else numbers
        return cls(front.levels, reading, runs, order, of_own, of_copies, several)


def front_keys(context: SegmentContext, device: torch.device) -> FrontKeys | None:
    """Of the segment that runs, made once a step; None: nothing is in front."""
    cache, index = context.cache, context.index

    def make() -> tuple[FrontKeys | None]:
        front = cache.front(index)
        return (front and FrontKeys.of(front, cache.map.lengths[index], device),)

    (keys,) = cache.once(index, "front", make)
    return keys


class KeysInFront:
    """A segment's own K and V behind those in front of them; see OwnKeys."""

    def __init__(self, own: OwnKeys, front: FrontKeys, context: SegmentContext, layer: int) -> None:
        self._own, self._front, self._cache = own, front, context.cache
        self._place = layer, context.index

    def runs(self) -> KeyValue:
        read = self._cache.read(*self._place, self._front.reading)
        key, value = (
            torch.cat(both).index_select(0, self._front.order)
            for both in zip(read, self._own.runs(), strict=True)
        )
        return key, value

    def send(self, gradients: KeyValue) -> None:
        front = self._front
        copies = (gradient.index_select(0, front.copies) for gradient in gradients)
        sums = tuple([summed(of_copies, front.numbers) for of_copies in copies])
        self._cache.add(*self._place, front.reading, sums)
        key, value = (gradient.index_select(0, front.own) for gradient in gradients)
        self._own.send((key, value))

    def take(self) -> KeyValue:
        return self._own.take()


def _ranges(intervals: np.ndarray) -> np.ndarray:
    """Numbers of intervals [number, 2], one after the other: of many short ones, in few calls."""
    starts, lengths = intervals[:, 0], intervals[:, 1] - intervals[:, 0]
    begins = np.cumsum(lengths) - lengths
    result: np.ndarray = np.repeat(starts - begins, lengths) + np.arange(lengths.sum())
    return result
