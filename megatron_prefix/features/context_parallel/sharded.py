"""Context-parallel ranks that keep their own positions of inner segments (cp_reduce "wave").

It takes the least memory: whoever reads gathers again, one layer ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from megatron_prefix.features.context_parallel import places
from megatron_prefix.features.context_parallel.own_keys import GatheredKeys
from megatron_prefix.sidecar.arena import (
    Arena,
    DeviceBytes,
    KeyValue,
    Lengths,
    LevelReading,
    OwnKeys,
    Payload,
    Reading,
)
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.sidecar.row_exchange import Pending, RowExchange, halves, side_by_side
from megatron_prefix.tree.payload_map import RowMap


class ShardedArena(Arena):
    """Every rank keeps its own positions.

    A level is gathered when it is read or before, and stays until `leave`. Its gradients are sent
    to the owners at once, and added there later.

    Args:
        rows: of this rank's part of segments.
    """

    looks_ahead = True

    def __init__(
        self,
        exchange: RowExchange,
        rows: RowMap,
        device_bytes: DeviceBytes,
        lengths: tuple[Lengths, ...],
    ) -> None:
        super().__init__(rows, device_bytes)
        self._exchange, self._lengths = exchange, lengths
        self._views: dict[LevelReading, Pending] = {}
        self._coming: list[tuple[LevelReading, Pending]] = []

    def keys(
        self, cache: SidecarCache, place: tuple[int, int], inner: bool, key_value: KeyValue
    ) -> OwnKeys:
        lengths = self._lengths[place[1]]
        if not inner:
            return GatheredKeys(self._exchange, lengths, key_value)
        cache.capture(*place, key_value)
        key, value = cache.own(*place)
        returned = functools.partial(cache.take, *place)
        return GatheredKeys(self._exchange, lengths, (key, value), returned=returned)

    def fetch(
        self, visible: Collection[int], sums: Collection[int], levels: Iterable[LevelReading]
    ) -> None:
        for level in levels:
            if level not in self._views:
                self._gather(visible, level)

    def leave(self) -> None:
        self._views.clear()

    def read(self, visible: Collection[int], what: Reading) -> Payload:
        """Of a level K and V, [size * keys, kv_heads, dim], run after run."""
        if not isinstance(what, LevelReading):
            return super().read(visible, what)
        coming = self._views.get(what) or self._gather(visible, what)
        if coming.works:
            (key_value,), order = coming.wait(), self._order(what)
            key_value = key_value if order is None else key_value.index_select(0, order)
            self._views[what] = coming = Pending((), (key_value,))
        return halves(coming.tensors[0], self.width)

    def add(self, visible: Collection[int], what: Reading, gradients: Payload) -> None:
        if not isinstance(what, LevelReading):
            super().add(visible, what, gradients)
            return
        view, order = side_by_side(gradients), self._order(what)
        if order is not None:
            view = torch.empty_like(view).index_copy_(0, order, view)
        self._settle(newer=what.index)
        self._coming.append((what, self._exchange.reduce_scatter(view)))

    def sent(self, index: int) -> Payload | None:
        self._settle()
        return super().sent(index)

    def drop(self) -> None:
        super().drop()
        self._views.clear()
        self._coming.clear()

    def _gather(self, visible: Collection[int], level: LevelReading) -> Pending:
        self._views[level] = coming = self._exchange.gather(*super().read(visible, level))
        return coming

    def _order(self, level: LevelReading) -> Tensor | None:
        """Where the keys of every run are in the gathered view, in which the ranks' keys of all
        runs lie end to end; None for a single run, whose order does not matter."""
        if len(level.key_lengths) == 1:
            return None
        return self._exchange.table(places.runs_in_view, level.key_lengths, self.values[0].device)

    def _settle(self, newer: int | None = None) -> None:
        """Waits for gradients that were sent here and adds them, except those from `newer`."""
        coming = self._coming
        self._coming = [entry for entry in coming if entry[0].index == newer]
        for level, pending in coming:
            if level.index != newer:
                (key_value,) = pending.wait()
                super().add((), level, halves(key_value, self.width))
