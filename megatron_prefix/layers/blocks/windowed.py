"""Attention of segments in layers with a window: one call of the kernel, without a merge.

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
from torch.autograd.function import once_differentiable

from megatron_prefix.device.transfer import on
from megatron_prefix.layers.blocks.interface import Kernel, Runs
from megatron_prefix.layers.blocks.sinks import sink_gradient, with_sink
from megatron_prefix.sidecar.arena import Both, Payload, TailReading, wide
from megatron_prefix.tree.payload_map import Form

if TYPE_CHECKING:
    from megatron_prefix.layers.blocks.core import SegmentContext


class Tails:
    """K and V of the last positions of every span are what a layer leaves; see Leaving.

    Args:
        form: of the payload.
        running: says which segment runs.
    """

    def __init__(self, form: Form, running: Any) -> None:
        self.form, self._running = form, running

    def left(self, key: Tensor, value: Tensor) -> Payload:
        """See Leaving."""
        rows = self._rows(key.device)
        return key.index_select(0, rows), value.index_select(0, rows)

    def returned(self, sent: Payload, gradients: Both) -> None:
        """See Leaving."""
        rows = self._rows(gradients[0].device)
        for gradient, more in zip(gradients, sent, strict=True):
            both = gradient.index_select(0, rows) + more  # summed before it is rounded
            gradient.index_copy_(0, rows, both.to(gradient.dtype))

    def _rows(self, device: torch.device) -> Tensor:
        """Last positions of the running segment's spans, int64."""
        return window_of(self._running.current, self.form, device).last


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
            one.new_zeros((num + sum(self.runs.queries), *one.shape[1:]), dtype=wide(one))
            .index_add_(0, self.order, one.to(wide(one)))
            for one in gradients
        ]  # fmt: skip
        context.cache.add(layer, context.index, self.reading, (sums[0][:num], sums[1][:num]))
        return sums[0][num:], sums[1][num:]


def window_of(context: SegmentContext, form: Form, device: torch.device) -> WindowKeys:
    """A segment's keys in layers of a form; made in the first of them, for all."""
    found = context.windows.get(form)
    if found is None:
        found = context.windows[form] = _window(context, form, device)
    return found


def _window(context: SegmentContext, form: Form, device: torch.device) -> WindowKeys:
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


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: SegmentContext,
    layer: int,
    scale: float,
    kernel: Kernel,
    shared: Tails,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of one segment in one layer with a window; arguments as of `segment_attention`, but
    the kernel has the window."""
    call = _Call(context, layer, scale, kernel, shared)
    out: Tensor = _WindowAttention.apply(
        query.squeeze(1), key.squeeze(1), value.squeeze(1), sink, call
    )
    return out.flatten(1).unsqueeze(1)


class _Call(NamedTuple):
    """What `window_attention` was called with, but for tensors."""

    context: SegmentContext
    layer: int
    scale: float
    kernel: Kernel
    shared: Tails


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, call: _Call
    ) -> Tensor:
        context, layer, scale, kernel, shared = call
        context.capture(layer, shared, key, value)
        context.enter(layer, backward=context.backward)
        window = window_of(context, shared.form, key.device)
        keys = window.keys(layer, context, (key, value))
        part = kernel.forward(query, *keys, window.runs, scale)
        out, lse = with_sink(part.out, part.lse, sink)
        context.leave(layer, backward=False)
        ctx.call, ctx.aux = call, part.aux
        ctx.save_for_backward(query, key, value, out, lse, sink)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        context, layer, scale, kernel, shared = ctx.call
        query, key, value, out, lse, sink = ctx.saved_tensors
        context.enter(layer, backward=True)
        window = window_of(context, shared.form, key.device)
        keys = window.keys(layer, context, (key, value))
        query_grad, *both = kernel.backward(
            out_grad, query, *keys, out, lse, ctx.aux, window.runs, scale
        )
        del keys
        key_grad, value_grad = window.pull(layer, context, (both[0], both[1]))
        key_grad, value_grad = key_grad.to(key.dtype), value_grad.to(value.dtype)
        if context.inner:
            sent = context.cache.take(layer, context.index)
            if sent is not None:
                shared.returned(sent, (key_grad, value_grad))
        context.leave(layer, backward=True)
        return query_grad, key_grad, value_grad, sink_gradient(out_grad, out, lse, sink), None
