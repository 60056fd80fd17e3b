"""Keys of short ancestors in front of a segment's own, for one causal call (tree/fronts.py).

What is copied is read once, and the gradients of copies are summed before they are sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.sidecar.arena import KeyValue, OwnKeys, Reading, summed
from megatron_prefix.sidecar.cache import as_rows
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.fronts import Front

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext


class FrontKeys(NamedTuple):
    """Keys of one call over a segment's own and those in front of them.

    Attributes:
        levels: that the call takes the place of.
        reading: the ancestors' rows.
        order: of every key its place in [ancestors' keys, own keys], int64 [keys].
        own: where own keys are among the keys, int64 [positions].
        copies: where copies are, those of one ancestor's key side by side, int64 [copies].
        numbers: copies of each of these keys, int64 [num_read].
        runs: of the queries.
    """

    levels: tuple[int, ...]
    reading: Reading
    order: Tensor
    own: Tensor
    copies: Tensor
    numbers: Tensor
    runs: Runs

    @classmethod
    def of(cls, front: Front, lengths: Sequence[int], device: torch.device) -> FrontKeys:
        """Of spans of these lengths."""
        num_read = sum(stop - start for start, stop in front.rows)
        places, queries, keys = key_order(lengths, front.spans, num_read, num_read)
        own, copies = np.flatnonzero(places >= num_read), np.flatnonzero(places < num_read)
        copies = copies[np.argsort(places[copies], kind="stable")]
        parts = places, own, copies, np.bincount(places[copies], minlength=num_read)
        on_device = to_device(device, np.concatenate(parts)).split([*map(len, parts)])
        order, of_own, of_copies, numbers = on_device
        reading, runs = Reading(as_rows(device, front.rows)), Runs(queries, keys, causal=True)
        return cls(front.levels, reading, order, of_own, of_copies, numbers, runs)


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


def key_order(
    own: Sequence[int], spans: Sequence[Sequence[tuple[int, int]]], window: int, num_read: int,
    rank: int = 0, size: int = 1,
) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Where the keys of runs are, and queries and keys of every run.

    Args:
        own: lengths of spans.
        spans: of each the intervals of its ancestors' keys among those that are read.
        window: keys before its own that a query sees.
        num_read: keys that are read; own keys come behind them.
    """
    view = cp_layout.view_order(own, size) + num_read
    order, queries, keys = [], [], []
    for above, begin, length in zip(spans, itertools.accumulate(own, initial=0), own, strict=False):
        ancestors = np.concatenate([np.arange(0), *(np.arange(*bounds) for bounds in above)])
        for start, stop in cp_layout.pieces(length, rank, size):
            reached = ancestors[max(0, len(ancestors) - max(0, window - start)) :]
            order += [reached, view[begin + max(0, start - window) : begin + stop]]
            queries.append(stop - start)
            keys.append(len(order[-2]) + len(order[-1]))
    return np.concatenate(order), tuple(queries), tuple(keys)
