"""A segment's attention to its own keys: on one rank, and over context-parallel ranks.

On one rank it is one causal block. Of several ranks each has two pieces of every span
(megatron_prefix/tree/cp_layout.py): a piece sees itself causally, and the span's earlier pieces,
whose keys are gathered, without a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_prefix.attention.interface import Aux, Kernel, Partial, Runs
from megatron_prefix.sidecar.arena import Rows
from megatron_prefix.sidecar.cache import SidecarCache, on
from megatron_prefix.sidecar.context_parallel import Exchange, ShardedCache, side_by_side
from megatron_prefix.tree import cp_layout


class OwnAttention:
    """A segment's attention to its own keys: one causal block, on one rank.

    Args:
        kernel: runs it.
        query: [positions, heads, dim]; `key` and `value` likewise.
        scale: softmax scale.
        lengths: of the spans.
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
        self._runs, self._scale = Runs.own(lengths), scale

    def forward(self) -> list[Partial]:
        """One partial result."""
        return [self._kernel.forward(*self._tensors, self._runs, self._scale)]

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor, aux: Sequence[Aux]) -> Tensor:
        """The gradient of the queries, from the merged `out` and `lse`."""
        query_grad, *self._gradients = self._kernel.backward(
            dout, *self._tensors, out, lse, aux[0], self._runs, self._scale
        )
        return query_grad

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The gradients of keys and values; after `backward`."""
        key_grad, value_grad = self._gradients
        return key_grad, value_grad


class SpreadAttention:
    """The same where every context-parallel rank has a part of the positions.

    Args:
        kernel: runs each block.
        exchange: the group's collectives.
        query: this rank's [positions, heads, dim]; `key` and `value` likewise.
        scale: softmax scale.
        lengths: of the spans on this rank.
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
        self._pieces, self._paired = Runs.own(blocks.pieces), blocks.paired
        self._indices = _indices(whole, exchange.rank, exchange.size, query.device)
        self._views = exchange.gather(key, value)

    def forward(self) -> list[Partial]:
        """Partial results: every piece with itself, and with earlier pieces."""
        query, scale = self._query, self._scale
        parts = [self._kernel.forward(query, self._key, self._value, self._pieces, scale)]
        key, value = self._views.wait()
        for block, (mine, seen) in zip(self._paired, self._indices, strict=True):
            runs = Runs(block.query_lengths, block.key_lengths)
            part = self._kernel.forward(selected(query, mine), key[seen], value[seen], runs, scale)
            parts.append(spread(part, mine, len(query)))
        return parts

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor, aux: Sequence[Aux]) -> Tensor:
        """The gradient of the queries; starts to send those of keys and values."""
        query, scale = self._query, self._scale
        query_grad, *self._diagonal = self._kernel.backward(
            dout, query, self._key, self._value, out, lse, aux[0], self._pieces, scale
        )
        key, value = self._views.wait()
        dtype = torch.promote_types(key.dtype, torch.float32)
        width = key.shape[-1] + value.shape[-1]
        view_grad = torch.zeros((*key.shape[:2], width), dtype=dtype, device=key.device)
        for block, (mine, seen), block_aux in zip(
            self._paired, self._indices, aux[1:], strict=True
        ):
            more, *gradients = self._kernel.backward(
                selected(dout, mine), selected(query, mine), key[seen], value[seen],
                selected(out, mine), selected(lse, mine, 1), block_aux,
                Runs(block.query_lengths, block.key_lengths), scale,
            )  # fmt: skip
            view_grad[seen] = side_by_side(*gradients)
            query_grad = add_selected(query_grad, mine, more)
        self._sent = self._exchange.reduce_scatter(view_grad)
        return query_grad

    def gradients(self) -> tuple[Tensor, Tensor]:
        """dK and dV of this rank's positions, in fp32 or wider; after `backward`."""
        (both,) = self._sent.wait()
        width, (key_grad, value_grad) = self._key.shape[-1], self._diagonal
        return both[..., :width] + key_grad, both[..., width:] + value_grad


def selected(x: Tensor, mine: Rows, dim: int = 0) -> Tensor:
    """Some queries: a view of consecutive ones, else a copy."""
    if isinstance(mine, slice):
        return x.narrow(dim, mine.start, mine.stop - mine.start)
    return x.index_select(dim, mine)


def spread(part: Partial, mine: Rows, num_queries: int) -> Partial:
    """A result for some queries as one for all; the other queries see no key."""
    if isinstance(mine, slice) and mine == slice(0, num_queries):
        return part
    out = part.out.new_zeros((num_queries, *part.out.shape[1:]))
    lse = part.lse.new_full((part.lse.shape[0], num_queries), float("-inf"))
    out[mine], lse[:, mine] = part.out, part.lse
    return Partial(out, lse, part.aux)


def add_selected(total: Tensor, mine: Rows, part: Tensor) -> Tensor:
    """Adds the gradient of some queries to that of all, in place."""
    if isinstance(mine, slice):
        total[mine].add_(part)
    else:
        total.index_add_(0, mine, part)
    return total


def own_attention(
    cache: SidecarCache,
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    lengths: tuple[int, ...],
) -> OwnAttention | SpreadAttention:
    """The segment's own attention; with context parallelism it starts to gather keys."""
    if isinstance(cache, ShardedCache):
        return SpreadAttention(kernel, cache.exchange, query, key, value, scale, lengths)
    return OwnAttention(kernel, query, key, value, scale, lengths)


@functools.lru_cache(maxsize=256)
def _indices(
    lengths: tuple[int, ...], rank: int, size: int, device: torch.device
) -> tuple[tuple[Rows, Tensor], ...]:
    """Queries and keys of the paired blocks, on the device."""
    local = sum(lengths) // size
    found = []
    for block in cp_layout.own_blocks(lengths, rank, size).paired:
        whole = len(block.queries) == local
        mine: Rows = slice(0, local) if whole else on(device, block.queries)
        found.append((mine, on(device, block.keys)))
    return tuple(found)
