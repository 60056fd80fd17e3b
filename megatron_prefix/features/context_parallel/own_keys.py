"""A segment's own K and V in attention with context parallelism.

They are gathered in one call, in the forward and, if no rank keeps them, again in the backward;
their gradients are summed and reduced in fp32 or wider. ("The Llama 3 Herd of Models", section
3.3.2, gathers in the same way.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_prefix.device.fusion import has_triton
from megatron_prefix.features.context_parallel import places
from megatron_prefix.sidecar.arena import KeyValue, Lengths, Payload, with_returned
from megatron_prefix.sidecar.row_exchange import Pending, RowExchange, halves, side_by_side

_PLACES = {"own": places.own, "own sums": places.own_sums}


class GatheredKeys:
    """Own K and V of all ranks in one call of attention; gathering starts at once unless `saved`.

    Args:
        saved: returns saved keys and values of `runs`.
        begin: returns gradients from descendants on this rank, in the order of the view.
        returned: returns gradients from descendants on all ranks to this rank's K and V.
    """

    def __init__(
        self,
        exchange: RowExchange,
        lengths: Lengths,
        key_value: KeyValue,
        *,
        saved: Callable[[], KeyValue] | None = None,
        begin: Callable[[], Tensor | None] | None = None,
        returned: Callable[[], Payload | None] | None = None,
    ) -> None:
        self._exchange, self._lengths, self._width = exchange, lengths, key_value[0].shape[-1]
        self._saved, self._begin, self._returned = saved, begin, returned
        if saved is None:
            self._coming: Pending = exchange.gather(*key_value)

    def runs(self) -> KeyValue:
        if self._saved is not None:
            return self._saved()
        (view,) = self._coming.wait()
        rows = self._table("own", view.device)
        return halves(view.index_select(0, rows), self._width)

    def send(self, gradients: KeyValue) -> None:
        begin = None if self._begin is None else self._begin()
        table = functools.partial(self._table, device=gradients[0].device)
        view = key_sums(gradients, table, sum(self._lengths), begin)
        self._coming = self._exchange.reduce_scatter(view)

    def take(self) -> KeyValue:
        """In fp32 or wider."""
        (key_value,) = self._coming.wait()
        local = halves(key_value, self._width)
        return local if self._returned is None else with_returned(local, self._returned())

    def _table(self, name: str, device: torch.device) -> Tensor:
        return self._exchange.table(_PLACES[name], self._lengths, device)


def key_sums(
    gradients: Payload, table: Callable[[str], Tensor], num: int, begin: Tensor | None
) -> Tensor:
    """Gradients of a rank's own runs of keys, summed where the keys lie in an exchange: gK and gV
    side by side in fp32 or wider, [num, kv_heads, dim + value_dim].

    A rank's two runs of a span share their first keys (tree/cp_layout.py), so a key has up to two
    gradients, and some have none.

    Args:
        gradients: of the keys and of the values of all runs, [keys of runs, kv_heads, (value_)dim].
        table: places by name: "own", of every run's keys in the result; "own sums", the reverse
            (`places.own_sums`).
        num: positions of the result.
        begin: what is there already, in the shape of the result, and is changed; None: nothing.
    """
    if has_triton(gradients[0].device.type):
        from megatron_prefix.features.context_parallel.key_sums_triton import key_sums_triton

        return key_sums_triton(gradients, table("own sums"), begin)
    runs = side_by_side(gradients)
    total = runs.new_zeros((num, *runs.shape[1:])) if begin is None else begin
    return total.index_add_(0, table("own"), runs)
