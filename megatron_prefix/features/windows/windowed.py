"""Layers with a window: one kernel call takes all visible keys, without a merge.

The keys of a span are preceded by the last `window` keys of its ancestors, so that a causal mask
from the bottom right shows its queries what they see in a whole rollout. Siblings share these
ancestor keys: they are read once, and their gradients are summed before they are sent.

With context parallelism a rank has two pieces of every span (tree/cp_layout.py). Each piece is a
run, preceded by `window` keys of the span or its ancestors. A segment's own keys are gathered as in
other layers. Every rank keeps the last keys of all spans, so reading them takes no message; their
gradients are summed over ranks once, in the segment's backward.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.layers.blocks.shared import Shared
from megatron_prefix.sidecar.arena import KeyValue, OwnKeys, Payload, TailReading, wider
from megatron_prefix.sidecar.row_exchange import halves, side_by_side
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import Form

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext


class Tails(Shared):
    """Payloads of K and V of the last positions of every span."""

    def __init__(self, form: Form) -> None:
        self._form, self.window = form, form.last

    def own(self, context: SegmentContext, layer: int, key_value: KeyValue) -> tuple[OwnKeys, Runs]:
        window = self._keys(context, key_value[0])
        return _KeysInWindow(window, context, layer, key_value), window.runs

    def _keys(self, context: SegmentContext, like: Tensor) -> WindowKeys:
        """`window_keys`, made once a step."""
        make = functools.partial(window_keys, context, self._form, like.device)
        return context.cache.once(context.index, self._form, make)

    def left(self, context: SegmentContext, key: Tensor, value: Tensor) -> Payload:
        window, exchange = self._keys(context, key), context.cache.exchange
        local = key.index_select(0, window.last), value.index_select(0, window.last)
        if exchange is None or window.places is None:
            return local
        joined = torch.cat(local, dim=-1)
        all_rows = joined.new_zeros((window.num_left, *joined.shape[1:]))
        return halves(exchange.total(all_rows.index_copy_(0, window.places, joined)), key.shape[-1])

    def returned(self, context: SegmentContext, payload_grad: Payload, gradients: KeyValue) -> None:
        window, exchange = self._keys(context, gradients[0]), context.cache.exchange
        rows = window.last
        if exchange is not None and window.places is not None:
            total = exchange.total(side_by_side(payload_grad)).index_select(0, window.places)
            payload_grad = halves(total, payload_grad[0].shape[-1])
        for gradient, returned in zip(gradients, payload_grad, strict=True):
            total_grad = gradient.index_select(0, rows) + returned  # summed before it is rounded
            gradient.index_copy_(0, rows, total_grad.to(gradient.dtype))


class WindowKeys(NamedTuple):
    """Keys of a segment in layers with a window.

    Attributes:
        reading: ancestors' keys; None: none.
        num_own: own positions on all ranks.
        order: per key of the runs its place in [ancestors' keys, gathered own keys], int64; None:
            own keys as they are.
        runs: of this rank's queries.
        last: this rank's positions that are in the segment's payload, int64, unique.
        num_left: rows of the segment's payload.
        places: of `last` in the payload, int64; None: all rows, in order.
    """

    reading: TailReading | None
    num_read: int
    num_own: int
    order: Tensor | None
    runs: Runs
    last: Tensor
    num_left: int
    places: Tensor | None

    def keys(self, layer: int, context: SegmentContext, own: KeyValue) -> KeyValue:
        if self.order is None:
            return own
        above = []
        if self.reading is not None:
            above.append(context.cache.read(layer, context.index, self.reading))
        key, value = (
            torch.cat(parts).index_select(0, self.order) for parts in zip(*above, own, strict=True)
        )
        return key, value

    def pull(self, layer: int, context: SegmentContext, gradients: KeyValue) -> KeyValue:
        """Adds the gradients of ancestors' keys to the sidecar; returns those of own keys."""
        if self.order is None:
            return gradients
        num = self.num_read
        sums = [
            grad.new_zeros((num + self.num_own, *grad.shape[1:]), dtype=wider(grad.dtype))
            .index_add_(0, self.order, grad.to(wider(grad.dtype)))
            for grad in gradients
        ]  # fmt: skip
        if self.reading is not None:
            context.cache.add(layer, context.index, self.reading, (sums[0][:num], sums[1][:num]))
        return sums[0][num:], sums[1][num:]


class _KeysInWindow:
    def __init__(
        self, window: WindowKeys, context: SegmentContext, layer: int, key_value: KeyValue
    ) -> None:
        self._window, self._place, self._both = window, (layer, context), key_value
        self._width, self._exchange = key_value[0].shape[-1], context.cache.exchange
        self._coming = None if self._exchange is None else self._exchange.gather(*key_value)

    def runs(self) -> KeyValue:
        return self._window.keys(*self._place, self.take())

    def send(self, gradients: KeyValue) -> None:
        self._both = self._window.pull(*self._place, gradients)
        if self._exchange is not None:
            self._coming = self._exchange.reduce_scatter(side_by_side(self._both))

    def take(self) -> KeyValue:
        """Without gradients from descendants, which see only the last positions; before `send` the
        keys and values that `runs` begins with."""
        if self._coming is None:
            return self._both
        (key_value,) = self._coming.wait()
        return halves(key_value, self._width)


def window_keys(context: SegmentContext, form: Form, device: torch.device) -> WindowKeys:
    """Keys that a segment's queries see in layers with payloads of this form."""
    cache = context.cache
    reading, own = cache.tail(context.index, form), cache.map.lengths[context.index]
    rank, size = (cache.exchange.rank, cache.exchange.size) if cache.exchange else (0, 1)
    spans = ((),) * len(own) if reading is None else reading.spans
    num_read = max((stop for span in spans for _, stop in span), default=0)
    order, queries, keys = key_order(own, spans, form.last or 0, num_read, rank, size)
    last_counts = [form.rows(length) for length in own]
    last, places = last_positions(own, last_counts, rank, size)
    return WindowKeys(
        reading, num_read, sum(own),
        None if reading is None and size == 1 else to_device(device, order),
        Runs(queries, keys, causal=True), to_device(device, last), sum(last_counts),
        None if size == 1 else to_device(device, places),
    )  # fmt: skip


def key_order(
    own: Sequence[int], spans: Sequence[Sequence[tuple[int, int]]], window: int, num_read: int,
    rank: int = 0, size: int = 1,
) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Where the keys of runs are, and queries and keys of every run.

    Args:
        own: lengths of spans.
        spans: of each the intervals of its ancestors' keys; see `Tail`.
        num_read: of these in all; own keys come behind them.
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


def last_positions(
    lengths: Sequence[int], last: Sequence[int], rank: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The last positions of spans that a rank holds: their places among its positions, and among
    the last positions of all spans.

    Args:
        last: per span the number of positions at its end.
    """
    local, places, begin, at = [], [], 0, 0
    for length, num in zip(lengths, last, strict=True):
        offsets = cp_layout.rank_positions(length, rank, size) - (length - num)
        hits = np.flatnonzero(offsets >= 0)
        local.append(hits + begin)
        places.append(offsets[hits] + at)
        begin, at = begin + length // size, at + num
    return np.concatenate(local), np.concatenate(places)
