"""A segment's attention to its own keys: on one rank, and spread over context-parallel ranks.

On one rank it is one causal block.  Spread over ranks, each has two chunks of every row: they see
themselves causally, and the row's earlier chunks, whose keys are gathered, without a mask
(megatron_prefix/tree/cp_layout.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_prefix.attention.interface import Aux, Kernel, Partial
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.sidecar.context_parallel import Exchange, ShardedCache, on, side_by_side
from megatron_prefix.tree import cp_layout


class OwnRows:
    """A segment's attention to its own keys: one causal block, on one rank.

    Args:
        kernel: runs it.
        query: [rows, heads, dim], and `key` and `value` likewise.
        scale: softmax scale.
        lengths: rows of each rollout.
    """

    def __init__(
        self,
        kernel: Kernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        lengths: tuple[int, ...],
    ) -> None:
        self._kernel, self._tensors = kernel, (query, key, value)
        self._scale, self._lengths = scale, lengths

    def forward(self) -> list[Partial]:
        """Its parts of the attention."""
        return [self._kernel.causal(*self._tensors, self._scale, self._lengths)]

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor, aux: Sequence[Aux]) -> Tensor:
        """The gradient of the queries, from the merged `out` and `lse`."""
        query_grad, *self._gradients = self._kernel.causal_backward(
            dout, *self._tensors, out, lse, aux[0], self._scale, self._lengths
        )
        return query_grad

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The gradients of keys and values; after `backward`."""
        key_grad, value_grad = self._gradients
        return key_grad, value_grad


class SpreadRows:
    """The same where every context-parallel rank has some of the rows.

    Args:
        kernel: runs each block.
        exchange: the group's collectives.
        query: this rank's [rows, heads, dim], and `key` and `value` likewise.
        scale: softmax scale.
        lengths: of the segment's rows on this rank.
    """

    def __init__(
        self,
        kernel: Kernel,
        exchange: Exchange,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        lengths: tuple[int, ...],
    ) -> None:
        self._kernel, self._exchange, self._scale = kernel, exchange, scale
        self._query, self._key, self._value = query, key, value
        whole = tuple(length * exchange.size for length in lengths)
        blocks = cp_layout.own_blocks(whole, exchange.rank, exchange.size)
        self._chunks, self._paired = blocks.pieces, blocks.paired
        self._indices = _indices(whole, exchange.rank, exchange.size, query.device)
        self._views = exchange.gather(key, value)

    def forward(self) -> list[Partial]:
        """A causal part of every chunk with itself, and the parts of earlier chunks."""
        query, scale = self._query, self._scale
        parts = [self._kernel.causal(query, self._key, self._value, scale, self._chunks)]
        key, value = self._views.wait()
        for block, (mine, seen) in zip(self._paired, self._indices, strict=True):
            part = self._kernel.paired(
                _rows(query, mine), key[seen], value[seen], scale,
                block.query_lengths, block.key_lengths,
            )  # fmt: skip
            parts.append(_spread(part, mine, len(query)))
        return parts

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor, aux: Sequence[Aux]) -> Tensor:
        """The gradient of the queries; those of keys and values are on their way afterwards."""
        query, scale = self._query, self._scale
        query_grad, *self._diagonal = self._kernel.causal_backward(
            dout, query, self._key, self._value, out, lse, aux[0], scale, self._chunks
        )
        key, value = self._views.wait()
        dtype = torch.promote_types(key.dtype, torch.float32)
        width = key.shape[-1] + value.shape[-1]
        view_grad = torch.zeros((*key.shape[:2], width), dtype=dtype, device=key.device)
        for block, (mine, seen), block_aux in zip(
            self._paired, self._indices, aux[1:], strict=True
        ):
            more, *gradients = self._kernel.paired_backward(
                _rows(dout, mine), _rows(query, mine), key[seen], value[seen], _rows(out, mine),
                lse if mine is None else lse[:, mine], block_aux, scale,
                block.query_lengths, block.key_lengths,
            )  # fmt: skip
            view_grad[seen] = side_by_side(*gradients)
            if mine is None:
                query_grad = query_grad.add_(more)
            else:
                query_grad[mine] += more
        self._sent = self._exchange.reduce_scatter(view_grad)
        return query_grad

    def gradients(self) -> tuple[Tensor, Tensor]:
        """dK and dV of this rank's rows, in fp32 or wider; after `backward`."""
        (both,) = self._sent.wait()
        width, (key_grad, value_grad) = self._key.shape[-1], self._diagonal
        return both[..., :width] + key_grad, both[..., width:] + value_grad


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


def _spread(part: Partial, rows: Tensor | None, padded_length: int) -> Partial:
    """A part of some rows as a part of all; the others see no key."""
    if rows is None:
        return part
    out = part.out.new_zeros((padded_length, *part.out.shape[1:]))
    lse = part.lse.new_full((part.lse.shape[0], padded_length), float("-inf"))
    out[rows], lse[:, rows] = part.out, part.lse
    return Partial(out, lse, part.aux)


def own_rows(
    cache: SidecarCache,
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    lengths: tuple[int, ...],
) -> OwnRows | SpreadRows:
    """The segment's own attention; where it is spread, its keys are on their way afterwards."""
    if isinstance(cache, ShardedCache):
        return SpreadRows(kernel, cache.exchange, query, key, value, scale, lengths)
    return OwnRows(kernel, query, key, value, scale, lengths)


@functools.lru_cache(maxsize=256)
def _indices(
    lengths: tuple[int, ...], rank: int, size: int, device: torch.device
) -> tuple[tuple[Tensor | None, Tensor], ...]:
    """Queries (None: all rows of the rank) and keys of the paired blocks, on the device."""
    local = sum(lengths) // size
    found = []
    for block in cp_layout.own_blocks(lengths, rank, size).paired:
        mine = None if len(block.queries) == local else on(device, block.queries)
        found.append((mine, on(device, block.keys)))
    return tuple(found)
