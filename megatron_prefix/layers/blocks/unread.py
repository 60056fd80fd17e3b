"""What of the last layer nobody reads, and what stands in for it.

Losses look at some positions of a segment only, and its descendants read K and V.  So where no loss
looks at a segment (`keys_only`), its queries see nothing in the last layer, and neither the output
projection nor the MLP runs (`skipped`); else these two and the output layer run on the positions
that are read (`picked`).  A backward begins where the layer ends, as everywhere, and gK/gV enter at
K and V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_prefix.layers.blocks.shared import Shared
from megatron_prefix.layers.own_backward import with_backward
from megatron_prefix.sidecar.arena import wider

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext


def keys_only(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: SegmentContext,
    layer: int,
    shared: Shared,
) -> Tensor:
    """Captures what an inner segment leaves, and lets its gradients in; arguments as of
    `segment_attention`.

    Returns:
        Zeros, [positions, 1, heads * value_dim], which must not be written to.
    """
    given = [one.squeeze(1) for one in (query, key, value)]
    like = [(one.shape, one.dtype) for one in given]

    def capture(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context.capture(layer, shared, key, value)
        context.leave(layer, backward=False)
        return _zeros(query, (len(query), query.shape[1] * value.shape[2]))

    def pull(out_grad: Tensor) -> tuple[Tensor, ...]:
        cache = context.cache
        if cache.looks_ahead:
            cache.prefetch(layer - 1, context.index, backward=True)
        sent = cache.take(layer, context.index) if context.inner else None
        if cache.looks_ahead:
            cache.release(layer)
        gradients = tuple([out_grad.new_zeros(shape, dtype=dtype) for shape, dtype in like])
        if sent is not None:
            shared.returned(context, sent, (gradients[1], gradients[2]))
        return gradients

    out: Tensor = with_backward(capture, pull, *given)
    return out.unsqueeze(1)


def skipped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of a shape instead of what a module makes of `x`; the graph goes on through it."""
    whole = x.shape
    out: Tensor = with_backward(
        lambda x: x.new_zeros(tuple(shape)), lambda gradient: _zeros(gradient, whole), x
    )
    return out


def picked(x: Tensor, rows: Tensor, *, repeats: bool = False) -> Tensor:
    """Some rows of `x`, int64 [rows]; its gradient is zero in the others.

    Args:
        x: [positions, ...].
        rows: which ones.
        repeats: whether some may be there more than once; gradients are then summed in fp32 or
            wider.
    """
    shape = x.shape

    def pull(gradient: Tensor) -> Tensor:
        if not repeats:
            return gradient.new_zeros(shape).index_copy_(0, rows, gradient)
        total = gradient.new_zeros(shape, dtype=wider(gradient.dtype))
        return total.index_add_(0, rows, gradient.to(total.dtype)).to(gradient.dtype)

    out: Tensor = with_backward(lambda x: x.index_select(0, rows), pull, x)
    return out


def reaching(x: Tensor, also: Tensor) -> Tensor:
    """`x`, from which a backward goes to `also` as well, with zeros."""
    shape = also.shape
    out: Tensor = with_backward(
        lambda x, also: x.view_as(x),
        lambda gradient: (gradient, gradient.new_zeros(shape)),
        x, also,
    )  # fmt: skip
    return out


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros without memory of their own."""
    return like.new_zeros(()).expand(tuple(shape))
