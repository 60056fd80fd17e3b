"""What of the last layer nobody reads, and what stands in for it.

Losses look at some positions of a segment only, and its descendants read K and V.  So where no loss
looks at a segment (`keys_only`), its queries see nothing in the last layer, and neither the output
projection nor the MLP runs (`skipped`); else these two and the output layer run on the positions
that are read (`picked`).  A backward begins where the layer ends, as everywhere, and gK/gV enter at
K and V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Size, Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_prefix.layers.blocks.shared import KEYS, Shared
from megatron_prefix.sidecar.arena import wide

if TYPE_CHECKING:
    from megatron_prefix.layers.blocks.core import SegmentContext


def keys_only(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: SegmentContext,
    layer: int,
    shared: Shared = KEYS,
) -> Tensor:
    """Captures what an inner segment leaves, and lets its gradients in; arguments as of
    `segment_attention`.

    Returns:
        Zeros, [positions, 1, heads * value_dim], which must not be written to.
    """
    out: Tensor = _KeysOnly.apply(
        query.squeeze(1), key.squeeze(1), value.squeeze(1), context, layer, shared
    )
    return out.unsqueeze(1)


def skipped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of a shape instead of what a module makes of `x`; the graph goes on through it."""
    out: Tensor = _Skipped.apply(x, Size(shape))
    return out


def picked(x: Tensor, rows: Tensor, *, repeats: bool = False) -> Tensor:
    """Some rows of `x`, int64 [rows]; its gradient is zero in the others.

    Args:
        x: [positions, ...].
        rows: which ones.
        repeats: whether some may be there more than once; gradients are then summed in fp32 or
            wider.
    """
    out: Tensor = _Picked.apply(x, rows, repeats)
    return out


def reaching(x: Tensor, also: Tensor) -> Tensor:
    """`x`, from which a backward goes to `also` as well, with zeros."""
    out: Tensor = _Reaching.apply(x, also)
    return out


class _KeysOnly(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: SegmentContext,
        layer: int,
        shared: Shared,
    ) -> Tensor:
        context.capture(layer, shared, key, value)
        if not context.backward:
            context.cache.release(layer)
        ctx.call = context, layer, shared, [(x.shape, x.dtype) for x in (query, key, value)]
        return _zeros(query, (len(query), query.shape[1] * value.shape[2]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        context, layer, shared, like = ctx.call
        cache = context.cache
        cache.prefetch(layer - 1, context.index, backward=True)
        sent = cache.take(layer, context.index) if context.inner else None
        cache.release(layer)
        gradients = [out_grad.new_zeros(shape, dtype=dtype) for shape, dtype in like]
        if sent is not None:
            shared.returned(context, sent, (gradients[1], gradients[2]))
        return *gradients, None, None, None


class _Skipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Size) -> Tensor:  # type: ignore[override]
        ctx.shape = x.shape
        return x.new_zeros(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _zeros(gradient, ctx.shape), None


class _Picked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, repeats: bool) -> Tensor:  # type: ignore[override]
        ctx.call = x.shape, rows, repeats
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shape, rows, repeats = ctx.call
        if not repeats:
            return gradient.new_zeros(shape).index_copy_(0, rows, gradient), None, None
        total = gradient.new_zeros(shape, dtype=wide(gradient))
        total.index_add_(0, rows, gradient.to(total.dtype))
        return total.to(gradient.dtype), None, None


class _Reaching(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, also: Tensor) -> Tensor:  # type: ignore[override]
        ctx.shape = also.shape
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_zeros(ctx.shape)


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros without memory of their own."""
    return like.new_zeros(()).expand(tuple(shape))
