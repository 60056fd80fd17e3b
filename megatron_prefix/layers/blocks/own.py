"""A segment's attention to its own keys, and blocks of some of its queries.

Over context-parallel ranks each has two pieces of every span (megatron_prefix/tree/cp_layout.py). A
piece is a run that sees its span up to its own end, so a rank's own attention is one call of the
kernel in any case.
"""

from __future__ import annotations

import functools

from torch import Tensor

from megatron_prefix.layers.blocks.interface import Aux, Kernel, Partial, Runs
from megatron_prefix.sidecar.arena import Both, Rows
from megatron_prefix.sidecar.store import OwnKeys
from megatron_prefix.tree import cp_layout


class OwnAttention:
    """A segment's attention to its own keys in one layer.

    Args:
        kernel: runs it.
        query: this rank's, [positions, heads, dim].
        keys: of the segment, in one call.
        scale: softmax scale.
        runs: what the queries see of them.
    """

    def __init__(
        self, kernel: Kernel, query: Tensor, keys: OwnKeys, scale: float, runs: Runs
    ) -> None:
        self._kernel, self._query, self._keys = kernel, query, keys
        self._runs, self._scale = runs, scale

    def forward(self) -> Partial:
        """The block's result."""
        return self._kernel.forward(self._query, *self._keys.runs(), self._runs, self._scale)

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor, aux: Aux) -> Tensor:
        """The gradient of the queries, from the merged `out` and `lse`; those of keys and values
        are on their way then."""
        query_grad, *gradients = self._kernel.backward(
            dout, self._query, *self._keys.runs(), out, lse, aux, self._runs, self._scale
        )
        self._keys.send((gradients[0], gradients[1]))
        return query_grad

    def gradients(self) -> Both:
        """Those of this rank's keys and values, descendants' included; after `backward`."""
        return self._keys.take()


@functools.lru_cache(maxsize=256)
def own_runs(lengths: tuple[int, ...], rank: int, size: int) -> Runs:
    """What a rank's queries see of their own segment, for spans of these (whole) lengths."""
    found = cp_layout.own_runs(lengths, rank, size)
    return Runs(found.queries, found.keys, causal=True)


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
