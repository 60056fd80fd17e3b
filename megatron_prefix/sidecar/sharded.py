"""The sidecar of context-parallel ranks that keep their own positions (cp_reduce "wave")."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_prefix.sidecar.arena import Both, Payload
from megatron_prefix.sidecar.cache import LevelReading, Reading, SidecarCache, pair
from megatron_prefix.sidecar.context_parallel import Exchange, OwnView, Pending
from megatron_prefix.sidecar.key_sums import beside
from megatron_prefix.tree.payload_map import Form, PayloadMap


class ShardedCache(SidecarCache):
    """The sidecar of a context-parallel rank: its own positions of every inner segment.

    Reads return whole views, gathered one layer at a time, and gradients of views are sent to the
    owners at once.

    Args:
        planned: where this rank's part of every segment lies.
        forms: see SidecarCache; only positions are exchanged: every rank has the states of its own
            heads.
        exchange: the group's collectives.
    """

    def __init__(self, planned: PayloadMap, forms: Sequence[Form], exchange: Exchange) -> None:
        super().__init__(planned, forms)
        self.exchange = exchange
        self._views: dict[tuple[int, int, int], Pending] = {}
        self._sent: dict[int, list[tuple[int, LevelReading, Pending]]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held now, with gathered views and gradients under way."""
        sent = (pending for all_sent in self._sent.values() for *_, pending in all_sent)
        tensors = (t for pending in (*self._views.values(), *sent) for t in pending[1])
        return super().num_bytes + sum(t.nbytes for t in tensors)

    def own_keys(self, layer: int, index: int, inner: bool, both: Both) -> OwnView:
        """See SidecarCache.own_keys."""
        of_all = functools.partial(OwnView, self.exchange, self.map.lengths[index])
        if not inner:
            return of_all(both)
        self.capture(layer, index, both)
        key, value = self.own(layer, index)
        return of_all((key, value), lambda: pair(self.take(layer, index)))

    def prefetch(self, layer: int, index: int, *, backward: bool = False) -> None:
        """Starts to gather what a layer will read; `layer` may be out of range."""
        if 0 <= layer < len(self.forms) and self.forms[layer] is Form.POSITIONS:
            for number in range(len(self.map.levels[index])):
                self._gather(layer, index, self.level(index, number))

    def _gather(self, layer: int, index: int, level: LevelReading) -> None:
        key = layer, index, level.number
        if key not in self._views:
            self._views[key] = self.exchange.gather(*super().read(layer, index, level))

    def release(self, layer: int) -> None:
        """Drops the views of a layer."""
        for key in [key for key in self._views if key[0] == layer]:
            del self._views[key]

    def read(self, layer: int, index: int, what: Reading) -> Payload:
        """K and V of a level on all ranks, [size * keys, kv_heads, dim], run after run; states as
        SidecarCache."""
        if not isinstance(what, LevelReading):
            return super().read(layer, index, what)
        self._gather(layer, index, what)
        key = layer, index, what.number
        (both,) = self._views[key].wait()
        order = self._run_order(layer, what)
        if order is not None and self._views[key].works:
            both = both.index_select(0, order)
        self._views[key] = Pending((), (both,))
        width = self._arenas[layer].width
        return both[..., :width], both[..., width:]

    def add(self, layer: int, index: int, what: Reading, gradients: Payload) -> None:
        """Sends what a segment gives to the keys of a level (shapes of `read`)."""
        if not isinstance(what, LevelReading):
            return super().add(layer, index, what, gradients)
        self._open(layer, index, self._seen(layer, index))
        view = beside(*gradients)
        order = self._run_order(layer, what)
        if order is not None:
            view = torch.empty_like(view).index_copy_(0, order, view)
        self._settle(layer, index)
        pending = self.exchange.reduce_scatter(view)
        self._sent.setdefault(layer, []).append((index, what, pending))
        return None

    def take(self, layer: int, index: int) -> Payload | None:
        """The accumulated gradients of this rank's rows of a segment; see SidecarCache."""
        self._settle(layer, None)
        return super().take(layer, index)

    def clear(self) -> None:
        """See SidecarCache."""
        super().clear()
        self._views.clear()
        self._sent.clear()

    def _run_order(self, layer: int, level: LevelReading) -> Tensor | None:
        """Where the keys of every run are in the gathered view, in which the ranks' keys of all
        runs lie end to end; None for a single run, whose order does not matter."""
        if len(level.key_lengths) == 1:
            return None
        return self.exchange.table("runs", level.key_lengths, self._arenas[layer].device)

    def _settle(self, layer: int, newer: int | None) -> None:
        """Adds the results of a layer's reductions, but not those of the segment `newer`."""
        waiting = self._sent.get(layer, [])
        self._sent[layer] = [sent for sent in waiting if sent[0] == newer]
        for index, level, pending in waiting:
            if index != newer:
                (both,) = pending.wait()
                width = self._arenas[layer].width
                super().add(layer, index, level, (both[..., :width], both[..., width:]))
