"""Context-parallel ranks that keep all positions of inner segments (cp_reduce "segment").

A segment's own attention gathers them anyway, so readers exchange nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_prefix.features.context_parallel import places
from megatron_prefix.features.context_parallel.own_keys import GatheredKeys
from megatron_prefix.sidecar.arena import Arena, DeviceBytes, KeyValue, Lengths, OwnKeys, Payload
from megatron_prefix.sidecar.cache import SegmentState, SidecarCache
from megatron_prefix.sidecar.row_exchange import Pending, RowExchange, halves, segment_order
from megatron_prefix.tree.payload_map import RowMap


class GatheredArena(Arena):
    """Every rank keeps all positions; gradients from descendants are summed locally and cross once,
    in the segment's backward, together with those of its own attention.

    Args:
        rows: of whole segments; the queries that read them are this rank's.
    """

    def __init__(
        self,
        exchange: RowExchange,
        rows: RowMap,
        device_bytes: DeviceBytes,
        lengths: tuple[Lengths, ...],
    ) -> None:
        super().__init__(rows, device_bytes)
        self._exchange, self._lengths = exchange, lengths
        self._coming: dict[int, Pending] = {}

    def keys(
        self, cache: SidecarCache, place: tuple[int, int], inner: bool, key_value: KeyValue
    ) -> OwnKeys:
        index, lengths = place[1], self._lengths[place[1]]
        if not inner:
            return GatheredKeys(self._exchange, lengths, key_value)
        if cache.state(*place) is SegmentState.EMPTY:
            self._expect(index, key_value)

        def saved() -> KeyValue:
            cache.capture(*place, key_value)
            key, value = cache.own(*place)
            rows = self._exchange.table(places.own_in_order, lengths, key.device)
            return key.index_select(0, rows), value.index_select(0, rows)

        def begin() -> Tensor | None:
            cache.consume(*place)
            return self._total(index)

        return GatheredKeys(self._exchange, lengths, key_value, saved=saved, begin=begin)

    def write(self, index: int, payload: Payload) -> None:
        self._expect(index, payload)
        (view,) = self._coming.pop(index).wait()
        key_value = view.index_select(
            0, self._exchange.table(segment_order, self._lengths[index], view.device)
        )
        super().write(index, halves(key_value, payload[0].shape[-1]))

    def sent(self, index: int) -> Payload | None:
        total = self._total(index)
        if total is None:
            return None
        (key_value,) = self._exchange.reduce_scatter(total).wait()
        return halves(key_value, self.width)

    def drop(self) -> None:
        super().drop()
        self._coming.clear()

    def _expect(self, index: int, key_value: Payload) -> None:
        if index not in self._coming:
            self._coming[index] = self._exchange.gather(*key_value)

    def _total(self, index: int) -> Tensor | None:
        """This rank's sums of gK and gV of a whole segment, in the order of an exchange."""
        sums = super().sent(index)
        if sums is None:
            return None
        key_value = torch.cat(sums, dim=-1)
        rows = self._exchange.table(places.view_positions, self._lengths[index], key_value.device)
        return key_value.index_select(0, rows)
