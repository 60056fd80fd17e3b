"""Layers with a window: one call of the kernel takes all that queries see, without a merge.

In front of the keys of a span lie the last ones of its ancestors, as many as the window is wide, so
its queries see causally, from the bottom right, all that they see in a whole rollout. Siblings have
such keys in common: they are read once, and their gradients are summed before they are sent.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import on
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.layers.blocks.shared import Shared
from megatron_prefix.sidecar.arena import Both, OwnKeys, Payload, TailReading, wider
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
        rows = _keys_of(context, self._form, key.device).last
        return key.index_select(0, rows), value.index_select(0, rows)

    def returned(self, context: SegmentContext, sent: Payload, gradients: Both) -> None:
        """See Shared."""
        rows = _keys_of(context, self._form, gradients[0].device).last
        for gradient, more in zip(gradients, sent, strict=True):
            both = gradient.index_select(0, rows) + more  # summed before it is rounded
            gradient.index_copy_(0, rows, both.to(gradient.dtype))


class WindowKeys(NamedTuple):
    """Keys of a segment in layers with a window.

    Attributes:
        reading: what it reads of ancestors; None: nothing.
        num_read: rows of it.
        order: places of [what is read, own keys], span behind span, int64.
        runs: of its queries.
        last: its own positions that it leaves, int64; all different.
    """

    reading: TailReading | None
    num_read: int
    order: Tensor
    runs: Runs
    last: Tensor

    def keys(self, layer: int, context: SegmentContext, own: Both) -> Both:
        """Of all runs, in their order."""
        if self.reading is None:
            return own
        above = context.cache.read(layer, context.index, self.reading)
        key, value = (
            torch.cat(pair).index_select(0, self.order) for pair in zip(above, own, strict=True)
        )
        return key, value

    def pull(self, layer: int, context: SegmentContext, gradients: Both) -> Both:
        """Sends what `keys` has read its gradients, and returns those of the segment's own."""
        if self.reading is None:
            return gradients
        num = self.num_read
        sums = [
            one.new_zeros((num + sum(self.runs.queries), *one.shape[1:]), dtype=wider(one.dtype))
            .index_add_(0, self.order, one.to(wider(one.dtype)))
            for one in gradients
        ]  # fmt: skip
        context.cache.add(layer, context.index, self.reading, (sums[0][:num], sums[1][:num]))
        return sums[0][num:], sums[1][num:]


class _KeysInWindow:
    """OwnKeys of a span, behind the last ones of its ancestors."""

    def __init__(self, window: WindowKeys, context: SegmentContext, layer: int, both: Both) -> None:
        self._window, self._place, self._both = window, (layer, context), both

    def runs(self) -> Both:
        """See OwnKeys."""
        return self._window.keys(*self._place, self._both)

    def send(self, gradients: Both) -> None:
        """See OwnKeys."""
        self._both = self._window.pull(*self._place, gradients)

    def take(self) -> Both:
        """See OwnKeys; without those of descendants, which see a part of them."""
        return self._both


def _keys_of(context: SegmentContext, form: Form, device: torch.device) -> WindowKeys:
    """The segment's `window_keys`, made once a step."""
    return context.cache.once(context.index, form, lambda: window_keys(context, form, device))


def window_keys(context: SegmentContext, form: Form, device: torch.device) -> WindowKeys:
    """What a segment's queries see in layers of a form."""
    reading, own = context.cache.tail(context.index, form), context.cache.map.lengths[context.index]
    spans = ((),) * len(own) if reading is None else reading.spans
    begins = itertools.accumulate(own[:-1], initial=0)
    order, last, keys = [], [], []
    num_read = max((stop for span in spans for _, stop in span), default=0)
    for above, begin, length in zip(spans, begins, own, strict=True):
        order += [np.arange(*one) for one in above]
        order.append(np.arange(begin, begin + length) + num_read)
        last.append(np.arange(begin + length - form.rows(length), begin + length))
        keys.append(length + sum(stop - start for start, stop in above))
    runs = Runs(tuple(own), tuple(keys), causal=True)
    places: list[Any] = [on(device, np.concatenate(one)) for one in (order, last)]
    return WindowKeys(reading, num_read, places[0], runs, places[1])
