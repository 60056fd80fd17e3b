"""Outputs of the last layer that nothing uses are not computed.

Losses read some positions of a segment, and descendants read only K and V. In a segment without
loss the last layer computes no attention (`keys_only`), output projection or MLP (`skipped`); else
the latter two and the output layer run on the scored positions only (`picked`). The backward begins
at the end of the layer, as everywhere, and gK/gV enter at K and V.
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
    query: Tensor, key: Tensor, value: Tensor, context: SegmentContext, layer: int, shared: Shared
) -> Tensor:
    """Captures the payload, and adds gradients from descendants in the backward; arguments as of
    `segment_attention`.

    Returns:
        Zeros, [positions, 1, heads * value_dim], which must not be written to.
    """
    tensors = [tensor.squeeze(1) for tensor in (query, key, value)]
    like = [(tensor.shape, tensor.dtype) for tensor in tensors]

    def capture(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context.capture(layer, shared, key, value)
        context.leave(layer, backward=False)
        return _zeros(query, (len(query), query.shape[1] * value.shape[2]))

    def pull(out_grad: Tensor) -> tuple[Tensor, ...]:
        cache = context.cache
        if cache.looks_ahead:
            cache.prefetch(layer - 1, context.index, backward=True)
        returned = cache.take(layer, context.index) if context.inner else None
        if cache.looks_ahead:
            cache.release(layer)
        gradients = tuple([out_grad.new_zeros(shape, dtype=dtype) for shape, dtype in like])
        if returned is not None:
            shared.returned(context, returned, (gradients[1], gradients[2]))
        return gradients

    out: Tensor = with_backward(capture, pull, *tensors)
    return out.unsqueeze(1)


def skipped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of a shape in place of a module's output for `x`; the graph goes on through it."""
    input_shape = x.shape
    out: Tensor = with_backward(
        lambda x: x.new_zeros(tuple(shape)), lambda gradient: _zeros(gradient, input_shape), x
    )
    return out


def picked(x: Tensor, rows: Tensor, *, repeats: bool = False) -> Tensor:
    """Rows of `x`; its gradient is zero in the others.

    Args:
        x: [positions, ...].
        rows: int64 [rows].
        repeats: whether rows may repeat; gradients are then summed in fp32 or wider.
    """
    shape = x.shape

    def pull(gradient: Tensor) -> Tensor:
        if not repeats:
            return gradient.new_zeros(shape).index_copy_(0, rows, gradient)
        total = gradient.new_zeros(shape, dtype=wider(gradient.dtype))
        return total.index_add_(0, rows, gradient.to(total.dtype)).to(gradient.dtype)

    out: Tensor = with_backward(lambda x: x.index_select(0, rows), pull, x)
    return out


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_zeros(()).expand(tuple(shape))
