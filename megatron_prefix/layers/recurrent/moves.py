"""Moves of positions in recurrent layers, with a backward that moves their gradients back.

Autograd's backward of `index_select` fills a tensor like its whole input with zeros and adds the
two, that of `index_copy` copies: tensors as large as the layer's input, six for every segment
(benchmarks/LOG.md). Where a tensor is written to here, nobody else has it: it comes from the kernel
between two of these moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_prefix.layers.recurrent.spans import Spans


def with_some(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`x`, which must be used in its place by one kernel alone, and some of its rows.

    Args:
        x: [positions, width].
        rows: int64 [number].
    """
    return cast(tuple[Tensor, Tensor], _WithSome.apply(x, rows))


def overwritten(y: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """`y` with other rows in some places, in its own memory.

    Args:
        y: what a kernel made, [1, positions, width].
        places: int64 [number], all different.
        rows: [number, width].
    """
    return cast(Tensor, _Overwritten.apply(y, places, rows))


def permuted(x: Tensor, order: Tensor, reverse: Tensor) -> Tensor:
    """The rows of `x` [positions, ...] in another order; `reverse` is the way back, both int64."""
    return cast(Tensor, _Permuted.apply(x, order, reverse))


def to_batches(x: Tensor, front: Tensor, still: Tensor, spans: Spans) -> tuple[Tensor, ...]:
    """Spans of a row as rows of batches, each behind what is in front of it.

    Args:
        x: [positions, width].
        front: [spans, before, width].
        still: what pads shorter rows, [width]; it gets no gradient.
        spans: of the row.

    Returns:
        For every batch of `Spans.batches` [rows, before + longest, width].
    """
    return cast(tuple[Tensor, ...], _ToBatches.apply(x, front, still, spans))


def from_batches(batches: Sequence[Tensor], spans: Spans, before: int) -> Tensor:
    """The reverse, without fronts and padding: [positions, width]."""
    return cast(Tensor, _FromBatches.apply(spans, before, *batches))


class _WithSome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.rows = rows
        return x.view_as(x), x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, of_rows: Tensor) -> tuple[Tensor, None]:
        return gradient.index_add_(0, ctx.rows, of_rows), None


class _Overwritten(torch.autograd.Function):
    # Only for kernels that do not save what they return: flash-linear-attention's (0.4.2) and
    # causal-conv1d's convolution save their inputs, `silu` its own. Autograd would notice by the
    # tensor's version, but not where hooks keep saved tensors, as for offloading. Not `mark_dirty`:
    # the first returns a view, where that raises.

    @staticmethod
    def forward(ctx: Any, y: Tensor, places: Tensor, rows: Tensor) -> Tensor:  # type: ignore[override]
        ctx.places = places
        y[0].index_copy_(0, places, rows)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        # A copy: the gradient comes from Megatron's code.
        return gradient.index_fill(1, ctx.places, 0), None, gradient[0].index_select(0, ctx.places)


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, reverse: Tensor) -> Tensor:  # type: ignore[override]
        ctx.reverse = reverse
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.reverse), None, None


class _ToBatches(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, front: Tensor, still: Tensor, spans: Spans
    ) -> tuple[Tensor, ...]:
        ctx.call = spans, front.shape[:2]
        made = []
        for batch in spans.batches(front.shape[1]):
            rows = x.index_select(0, batch.positions)
            rows.index_copy_(0, batch.front, front.index_select(0, batch.spans).flatten(0, 1))
            if batch.padding is not None:
                rows.index_copy_(0, batch.padding, still.expand(len(batch.padding), -1))
            made.append(rows.unflatten(0, (len(batch.numbers), -1)))
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        spans, shape = ctx.call
        own, front = spans.unbatched(shape[1])
        rows = _end_to_end(gradients)
        of_front = rows.index_select(0, front).unflatten(0, shape)
        return rows.index_select(0, own), of_front, None, None


class _FromBatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spans: Spans, before: int, *batches: Tensor) -> Tensor:  # type: ignore[override]
        ctx.call = spans, before
        return _end_to_end(batches).index_select(0, spans.unbatched(before)[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        spans, before = ctx.call
        made = []
        for batch in spans.batches(before):
            rows = gradient.index_select(0, batch.positions).index_fill_(0, batch.blank, 0)
            made.append(rows.unflatten(0, (len(batch.numbers), -1)))
        return None, None, *made


def _end_to_end(batches: Sequence[Tensor]) -> Tensor:
    """Rows of batches [rows, positions, width] as [all positions, width]."""
    rows = [batch.flatten(0, 1) for batch in batches]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
