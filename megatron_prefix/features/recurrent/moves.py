"""Moves of positions in recurrent layers, with a backward that moves their gradients back.

Autograd's backward of `index_select` fills a tensor like its whole input with zeros and adds the
two, that of `index_copy` copies: tensors as large as the layer's input, six for every segment
(benchmarks/LOG.md). Where a tensor is written to here, nobody else has it: it comes from the kernel
between two of these moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_prefix.features.recurrent.spans import Spans
from megatron_prefix.layers.own_backward import with_backward


def with_some(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`x`, which must be used in its place by one kernel alone, and some of its rows.

    Args:
        x: [positions, width].
        rows: int64 [number].
    """
    pair: tuple[Tensor, Tensor] = with_backward(
        lambda x: (x.view_as(x), x.index_select(0, rows)),
        lambda gradient, of_rows: gradient.index_add_(0, rows, of_rows),
        x,
    )
    return pair


def overwritten(y: Tensor, places: Tensor, rows: Tensor, repeats: Tensor | None) -> Tensor:
    """`y` with other rows in some places, in its own memory.

    Only for kernels that do not save what they return: flash-linear-attention's (0.4.2) and
    causal-conv1d's convolution save their inputs, `silu` its own. Autograd would notice by the
    tensor's version, but not where hooks keep saved tensors, as for offloading.

    Args:
        y: what a kernel made, [1, positions, width].
        places: int64 [number].
        rows: [number, width].
        repeats: which places are there already, with the same row: it gets no gradient twice.
    """

    def write(y: Tensor, rows: Tensor) -> Tensor:
        y[0].index_copy_(0, places, rows)
        return y.view_as(y)  # not `mark_dirty`: the first kernel returns a view, where that raises

    def pull(gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_rows = gradient[0].index_select(0, places)
        if repeats is not None:
            of_rows.masked_fill_(repeats.bool()[:, None], 0)
        # A copy: the gradient comes from Megatron's code.
        return gradient.index_fill(1, places, 0), of_rows

    out: Tensor = with_backward(write, pull, y, rows)
    return out


def permuted(x: Tensor, order: Tensor, reverse: Tensor) -> Tensor:
    """The rows of `x` [positions, ...] in another order; `reverse` is the way back, both int64."""
    out: Tensor = with_backward(
        lambda x: x.index_select(0, order), lambda gradient: gradient.index_select(0, reverse), x
    )
    return out


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
    shape = front.shape[:2]

    def make(x: Tensor, front: Tensor) -> tuple[Tensor, ...]:
        batches = []
        for batch in spans.batches(shape[1]):
            rows = x.index_select(0, batch.positions)
            rows.index_copy_(0, batch.front, front.index_select(0, batch.spans).flatten(0, 1))
            if batch.padding is not None:
                rows.index_copy_(0, batch.padding, still.expand(len(batch.padding), -1))
            batches.append(rows.unflatten(0, (len(batch.numbers), -1)))
        return tuple(batches)

    def pull(*gradients: Tensor) -> tuple[Tensor, Tensor]:
        own, front = spans.unbatched(shape[1])
        rows = _end_to_end(gradients)
        of_front = rows.index_select(0, front).unflatten(0, shape)
        return rows.index_select(0, own), of_front

    batches: tuple[Tensor, ...] = with_backward(make, pull, x, front)
    return batches


def from_batches(batches: Sequence[Tensor], spans: Spans, before: int) -> Tensor:
    """The reverse, without fronts and padding: [positions, width]."""

    def make(*batches: Tensor) -> Tensor:
        return _end_to_end(batches).index_select(0, spans.unbatched(before)[0])

    def pull(gradient: Tensor) -> tuple[Tensor, ...]:
        batches = []
        for batch in spans.batches(before):
            rows = gradient.index_select(0, batch.positions).index_fill_(0, batch.blank, 0)
            batches.append(rows.unflatten(0, (len(batch.numbers), -1)))
        return tuple(batches)

    out: Tensor = with_backward(make, pull, *batches)
    return out


def _end_to_end(batches: Sequence[Tensor]) -> Tensor:
    rows = [batch.flatten(0, 1) for batch in batches]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
