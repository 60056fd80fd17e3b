"""States come in from the sidecar and go out to it, inside autograd.

Backward is linear in what comes back to a state, so gradients of all children are summed, and the
parent's backward takes the sum as the gradient of its final state: as gK and gV for K and V
(layers/blocks/core.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_prefix.features.recurrent.moves import with_some
from megatron_prefix.features.recurrent.spans import Spans
from megatron_prefix.layers.kind import Running
from megatron_prefix.layers.own_backward import with_backward
from megatron_prefix.sidecar.arena import Payload, Reading, summed, wider

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext


def segment_of(running: Running) -> SegmentContext:
    """The segment that runs, in one of its layers."""
    if running.current is None:
        raise RuntimeError("a segment ended inside a recurrent layer")
    return running.current


def spans_of(context: SegmentContext) -> Spans:
    """What layers need to know of a segment's spans; made in the first, for all of them."""
    made: Spans | None = context.between.get(("spans", None))
    if made is None:
        lengths, parents = context.cache.map.lengths, context.cache.map.parents
        made = Spans(lengths[context.index], parents[context.index], context.positions.device)
        context.between["spans", None] = made
    return made


class LayerStates:
    """What a segment's spans begin with in one layer, and what they leave, in one forward.

    Args:
        anchor: a tensor that the layer computes with; it puts states into its graph.
        before: positions that the convolution looks back.

    Attributes:
        state: [spans, ...], in fp32 or wider; None if all are zero.
        tail: the convolution's last inputs [spans, before, channels]; None if all are zero.
    """

    def __init__(self, context: SegmentContext, layer: int, anchor: Tensor, before: int) -> None:
        self._context, self._layer, self._before = context, layer, before
        self.spans, self.inner = spans_of(context), context.inner
        self.state: Tensor | None = None
        self.tail: Tensor | None = None
        self._left: list[Tensor] = []
        context.enter(layer, backward=context.backward)
        if self.spans.has_parents:
            self.state, self.tail = _enter(anchor, context, layer)

    def edges(
        self, x: Tensor, channels: slice = slice(None), part: slice | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The convolution's inputs around the beginnings of spans; what they leave of `x` is kept.

        Args:
            x: its inputs, [positions, width].
            channels: those of `x` that it takes.
            part: which of the layer's these are, where it has several convolutions, which are
                asked for in turn; None: all.

        Returns:
            `x`, which must be used in its place by one kernel alone; and [spans, 2 * before,
            channels]: the parent's tail, then the span's first positions. None for a lone span
            without a parent, where nothing is before them.
        """
        is_one_root = self.spans.is_one_root
        if is_one_root and not self.inner:
            return x, None
        shape, edges = (len(self.spans), self._before), self.spans.edges(self._before)
        x, rows = with_some(x, edges.ends if self.inner else edges.first)
        first, *last = rows[:, channels].unflatten(0, (-1, *shape))
        tail = first.new_zeros(first.shape) if self.tail is None else self.tail
        if part is not None and self.tail is not None:
            tail = self.tail[..., part]
        if self.inner:
            left = last[0]
            if edges.tail is not None:
                sides = torch.cat([tail, first, *last], 1).flatten(0, 1)
                left = sides.index_select(0, edges.tail).unflatten(0, shape)
            self._left.append(left)
        return x, None if is_one_root else torch.cat([tail, first], 1)

    def leave(self, out: Tensor, state: Tensor | None) -> Tensor:
        """Keeps states for the segment's children.

        Args:
            state: of every span behind its last position; not needed for a wave.
        """
        if self.inner:
            if state is None or not self._left:
                raise RuntimeError("a recurrent layer has left no state: its kernel returned none")
            tail = self._left[0] if len(self._left) == 1 else torch.cat(self._left, -1)
            out = _leave(out, state, tail, self._context, self._layer)
        self._context.leave(self._layer, backward=False)
        return out


def _enter(anchor: Tensor, context: SegmentContext, layer: int) -> Payload:
    """What a segment's spans begin with; their gradients go to its parents."""

    def pull(*gradients: Tensor) -> None:
        context.enter(layer, backward=True)
        numbers, rows = spans_of(context).runs
        sums = (summed(gradient, numbers) for gradient in gradients)
        context.cache.add(layer, context.index, Reading(rows), tuple(sums))
        context.leave(layer, backward=True)

    payload: Payload = with_backward(
        lambda _: context.cache.read(layer, context.index, spans_of(context).reading), pull, anchor
    )
    return payload


def _leave(out: Tensor, state: Tensor, tail: Tensor, context: SegmentContext, layer: int) -> Tensor:
    """`out`, whose backward brings what the segment's children have sent to what it leaves."""
    dtypes = state.dtype, tail.dtype

    def capture(out: Tensor, state: Tensor, tail: Tensor) -> Tensor:
        context.cache.capture(layer, context.index, (state.to(wider(state.dtype)), tail))
        return out.view_as(out)

    def pull(gradient: Tensor) -> tuple[Tensor | None, ...]:
        context.enter(layer, backward=True)
        gradients = context.cache.take(layer, context.index) or (None, None)
        # Copies: the arena's rows will be others' again.
        pairs = zip(gradients, dtypes, strict=True)
        state, tail = (None if x is None else x.to(dtype, copy=True) for x, dtype in pairs)
        if not spans_of(context).has_parents:  # else the layer ends where it sends to them
            context.leave(layer, backward=True)
        return gradient, state, tail

    output: Tensor = with_backward(capture, pull, out, state, tail)
    return output
