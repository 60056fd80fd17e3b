"""The sidecar of context-parallel ranks that keep their own positions (cp_reduce "wave")."""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch
from torch import Tensor

from megatron_prefix.sidecar.arena import Both
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.sidecar.context_parallel import Exchange, OwnView, Pending
from megatron_prefix.sidecar.key_sums import beside
from megatron_prefix.tree.kv_layout import ArenaMap


class ShardedCache(SidecarCache):
    """The sidecar of a context-parallel rank: its own positions of every inner segment.

    Reads return whole views, gathered one layer at a time, and gradients of views are sent to the
    owners at once.

    Args:
        planned: where this rank's part of every segment lies.
        num_layers: see SidecarCache.
        exchange: the group's collectives.
        recurrent: see SidecarCache; every rank has the states of its own heads.
    """

    def __init__(
        self,
        planned: ArenaMap,
        num_layers: int,
        exchange: Exchange,
        recurrent: Collection[int] = (),
    ) -> None:
        super().__init__(planned, num_layers, recurrent=recurrent)
        self.exchange = exchange
        self._views: dict[tuple[int, int, int], Pending] = {}
        self._sent: dict[int, list[tuple[int, int, Pending]]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held now, with gathered views and gradients under way."""
        sent = (pending for all_sent in self._sent.values() for *_, pending in all_sent)
        tensors = (t for pending in (*self._views.values(), *sent) for t in pending[1])
        return super().num_bytes + sum(t.nbytes for t in tensors)

    def own_keys(self, layer: int, index: int, inner: bool, key: Tensor, value: Tensor) -> OwnView:
        """See SidecarCache.own_keys."""
        of_all = functools.partial(OwnView, self.exchange, self.map.lengths[index])
        if not inner:
            return of_all(key, value)
        self.capture(layer, index, key, value)
        return of_all(*self.own(layer, index), lambda: self.take_gradient(layer, index))

    def prefetch(self, layer: int, index: int, *, backward: bool = False) -> None:
        """Starts to gather what a layer will read; `layer` may be out of range."""
        if layer in self._attention:
            for number in range(len(self.map.levels[index])):
                self._gather(layer, index, number)

    def _gather(self, layer: int, index: int, number: int) -> None:
        key = layer, index, number
        if key not in self._views:
            self._views[key] = self.exchange.gather(*super().read(*key))

    def release(self, layer: int) -> None:
        """Drops the views of a layer."""
        for key in [key for key in self._views if key[0] == layer]:
            del self._views[key]

    def read(self, layer: int, index: int, number: int) -> Both:
        """K and V of a level on all ranks, [size * keys, kv_heads, dim], run after run."""
        self._gather(layer, index, number)
        (both,) = self._views[layer, index, number].wait()
        order = self._run_order(index, number)
        if order is not None and self._views[layer, index, number].works:
            both = both.index_select(0, order)
        self._views[layer, index, number] = Pending((), (both,))
        width = self._arenas[layer].width
        return both[..., :width], both[..., width:]

    def add_gradient(
        self, layer: int, index: int, number: int, key_grad: Tensor, value_grad: Tensor
    ) -> None:
        """Sends what a segment gives to the keys of a level (shapes of `read`)."""
        self._open(layer, index)
        view = beside(key_grad, value_grad)
        order = self._run_order(index, number)
        if order is not None:
            view = torch.empty_like(view).index_copy_(0, order, view)
        self._settle(layer, index)
        pending = self.exchange.reduce_scatter(view)
        self._sent.setdefault(layer, []).append((index, number, pending))

    def take_gradient(self, layer: int, index: int) -> Both | None:
        """The accumulated gK, gV of this rank's positions of a segment; see SidecarCache."""
        self._settle(layer, None)
        return super().take_gradient(layer, index)

    def clear(self) -> None:
        """See SidecarCache."""
        super().clear()
        self._views.clear()
        self._sent.clear()

    def _run_order(self, index: int, number: int) -> Tensor | None:
        """Where the keys of every run are in the gathered view, in which the ranks' keys of all
        runs lie end to end; None for a single run, whose order does not matter."""
        lengths = self.level(index, number).key_lengths
        if len(lengths) == 1:
            return None
        device = next(iter(self._arenas.values())).device
        return self.exchange.table("runs", lengths, device)

    def _settle(self, layer: int, newer: int | None) -> None:
        """Adds the results of a layer's reductions, but not those of the segment `newer`."""
        waiting = self._sent.get(layer, [])
        self._sent[layer] = [sent for sent in waiting if sent[0] == newer]
        for index, number, pending in waiting:
            if index != newer:
                (both,) = pending.wait()
                width = self._arenas[layer].width
                super().add_gradient(layer, index, number, both[..., :width], both[..., width:])
