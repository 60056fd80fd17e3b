"""Layers with a window: one call of the kernel takes all that queries see, without a merge.

In front of the keys of a span lie the last ones of its ancestors, as many as the window is wide, so
its queries see causally, from the bottom right, all that they see in a whole rollout. Siblings have
such keys in common: they are read once, and their gradients are summed before they are sent.

With context parallelism a rank has two pieces of every span (tree/cp_layout.py), and a piece is a
run of its own, behind as many keys of the span as the window is wide, or of ancestors. A segment's
own keys are gathered as in other layers. Of the last ones every rank keeps all, so that reading
them takes no message; gradients of them are summed over ranks once, in the segment's backward.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import on
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.layers.blocks.shared import Shared
from megatron_prefix.sidecar.arena import Both, OwnKeys, Payload, TailReading, wider
from megatron_prefix.sidecar.context_parallel import halves, side_by_side
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import Form

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext


class Tails(Shared):
    """K and V of the last positions of every span are what a layer leaves; see Shared.

    Args:
        form: of the payload.
    """

    def __init__(self, form: Form) -> None:
        self._form, self.window = form, form.last

    def own(self, context: SegmentContext, layer: int, both: Both) -> tuple[OwnKeys, Runs]:
        """See Shared."""
        window = _keys_of(context, self._form, both[0].device)
        return _KeysInWindow(window, context, layer, both), window.runs

    def left(self, context: SegmentContext, key: Tensor, value: Tensor) -> Payload:
        """See Shared."""
        window, exchange = _keys_of(context, self._form, key.device), context.cache.exchange
        mine = key.index_select(0, window.last), value.index_select(0, window.last)
        if exchange is None or window.places is None:
            return mine
        both = torch.cat(mine, dim=-1)
        whole = both.new_zeros((window.num_left, *both.shape[1:]))
        return halves(exchange.total(whole.index_copy_(0, window.places, both)), key.shape[-1])

    def returned(self, context: SegmentContext, sent: Payload, gradients: Both) -> None:
        """See Shared."""
        window, exchange = (
            _keys_of(context, self._form, gradients[0].device),
            context.cache.exchange,
        )
        rows = window.last
        if exchange is not None and window.places is not None:
            total = exchange.total(side_by_side(sent)).index_select(0, window.places)
            sent = halves(total, sent[0].shape[-1])
        for gradient, more in zip(gradients, sent, strict=True):
            both = gradient.index_select(0, rows) + more  # summed before it is rounded
            gradient.index_copy_(0, rows, both.to(gradient.dtype))


class WindowKeys(NamedTuple):
    """Keys of a segment in layers with a window.

    Attributes:
        reading: what it reads of ancestors; None: nothing.
        num_read: rows of it.
        num_own: its own positions on all ranks.
        order: places of [what is read, own keys as an exchange gathers them], run behind run,
            int64; None: own keys as they are.
        runs: of this rank's queries.
        last: this rank's own positions among those that the segment leaves, int64; all different.
        num_left: rows that the segment leaves.
        places: of this rank's own ones among them, int64; None: all of them.
    """

    reading: TailReading | None
    num_read: int
    num_own: int
    order: Tensor | None
    runs: Runs
    last: Tensor
    num_left: int
    places: Tensor | None

    def keys(self, layer: int, context: SegmentContext, own: Both) -> Both:
        """Of all runs, in their order."""
        if self.order is None:
            return own
        above = [] if self.reading is None else [self._read(layer, context)]
        key, value = (
            torch.cat(parts).index_select(0, self.order) for parts in zip(*above, own, strict=True)
        )
        return key, value

    def pull(self, layer: int, context: SegmentContext, gradients: Both) -> Both:
        """Sends what `keys` has read its gradients, and returns those of the segment's own."""
        if self.order is None:
            return gradients
        num = self.num_read
        sums = [
            one.new_zeros((num + self.num_own, *one.shape[1:]), dtype=wider(one.dtype))
            .index_add_(0, self.order, one.to(wider(one.dtype)))
            for one in gradients
        ]  # fmt: skip
        if self.reading is not None:
            context.cache.add(layer, context.index, self.reading, (sums[0][:num], sums[1][:num]))
        return sums[0][num:], sums[1][num:]

    def _read(self, layer: int, context: SegmentContext) -> Payload:
        return context.cache.read(layer, context.index, self.reading)  # type: ignore[arg-type]


class _KeysInWindow:
    """OwnKeys of a span, behind the last ones of its ancestors."""

    def __init__(self, window: WindowKeys, context: SegmentContext, layer: int, both: Both) -> None:
        self._window, self._place, self._both = window, (layer, context), both
        self._width, self._exchange = both[0].shape[-1], context.cache.exchange
        self._coming = None if self._exchange is None else self._exchange.gather(*both)

    def runs(self) -> Both:
        """See OwnKeys."""
        return self._window.keys(*self._place, self._waited())

    def send(self, gradients: Both) -> None:
        """See OwnKeys."""
        self._both = self._window.pull(*self._place, gradients)
        if self._exchange is not None:
            self._coming = self._exchange.reduce_scatter(side_by_side(self._both))

    def take(self) -> Both:
        """See OwnKeys; without those of descendants, which see a part of them."""
        return self._waited()

    def _waited(self) -> Both:
        """What an exchange brings; without one what is here."""
        if self._coming is None:
            return self._both
        (both,) = self._coming.wait()
        return halves(both, self._width)


def _keys_of(context: SegmentContext, form: Form, device: torch.device) -> WindowKeys:
    """The segment's `window_keys`, made once a step."""
    return context.cache.once(context.index, form, lambda: window_keys(context, form, device))


def window_keys(context: SegmentContext, form: Form, device: torch.device) -> WindowKeys:
    """What a segment's queries see in layers of a form."""
    cache, window = context.cache, form.last or 0
    reading, own = cache.tail(context.index, form), cache.map.lengths[context.index]
    rank, size = (cache.exchange.rank, cache.exchange.size) if cache.exchange else (0, 1)
    spans = ((),) * len(own) if reading is None else reading.spans
    num_read = max((stop for span in spans for _, stop in span), default=0)
    view = cp_layout.order(own, size) + num_read if size > 1 else np.arange(sum(own)) + num_read
    order, queries, keys = [], [], []
    for above, begin, length in zip(spans, itertools.accumulate(own, initial=0), own, strict=False):
        seen = np.concatenate([np.arange(0), *(np.arange(*one) for one in above)])
        for start, stop in cp_layout.pieces(length, rank, size):
            reached = seen[max(0, len(seen) - max(0, window - start)) :]
            order += [reached, view[begin + max(0, start - window) : begin + stop]]
            queries.append(stop - start)
            keys.append(len(order[-2]) + len(order[-1]))
    runs = Runs(tuple(queries), tuple(keys), causal=True)
    left = [form.rows(length) for length in own]
    last, places = cp_layout.last_positions(own, left, rank, size)
    return WindowKeys(
        reading, num_read, sum(own),
        None if reading is None and size == 1 else on(device, np.concatenate(order)),
        runs, on(device, last), sum(left), None if size == 1 else on(device, places),
    )  # fmt: skip
