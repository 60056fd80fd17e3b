"""The sidecar of context-parallel ranks that keep all positions (cp_reduce "segment")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_prefix.sidecar.arena import Both, Payload
from megatron_prefix.sidecar.cache import OwnKeys, SegmentState, SidecarCache
from megatron_prefix.sidecar.context_parallel import Exchange, OwnView, Pending
from megatron_prefix.tree.payload_map import Form, PayloadMap


class GatheredCache(SidecarCache):
    """The sidecar of a context-parallel rank: all positions of every inner segment.

    Readers exchange nothing. What descendants send is summed here and crosses once, in the
    backward of the segment, together with what its own attention gives.

    Args:
        planned: where the segments lie, whole; the queries are this rank's.
        forms: see SidecarCache; only positions are exchanged: every rank has the states of its own
            heads.
        exchange: the group's collectives.
    """

    def __init__(self, planned: PayloadMap, forms: Sequence[Form], exchange: Exchange) -> None:
        super().__init__(planned, forms)
        self.exchange = exchange
        self._coming: dict[tuple[int, int], Pending] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held now, with K/V that are on their way."""
        coming = (t for pending in self._coming.values() for t in pending.tensors)
        return super().num_bytes + sum(t.nbytes for t in coming)

    def own_keys(self, layer: int, index: int, inner: bool, both: Both) -> OwnView:
        """See SidecarCache.own_keys."""
        if not inner:
            return OwnView(self.exchange, self.map.lengths[index], both)
        self._expect_coming(layer, index, both)
        return _OwnRows(self, layer, index, both)

    def capture(self, layer: int, index: int, payload: Payload) -> None:
        """Gathers this rank's K and V and keeps those of all ranks; see SidecarCache."""
        if self.forms[layer] is not Form.POSITIONS:
            return super().capture(layer, index, payload)
        if self.state(layer, index) is SegmentState.CAPTURED:
            return None
        self._expect(layer, index, SegmentState.EMPTY)
        self._expect_coming(layer, index, payload)
        (view,) = self._coming.pop((layer, index)).wait()
        rows = self.exchange.table("order", self.map.lengths[index], view.device)
        whole = view.index_select(0, rows)
        width = payload[0].shape[-1]
        return super().capture(layer, index, (whole[..., :width], whole[..., width:]))

    def take(self, layer: int, index: int) -> Payload | None:
        """The gradients that descendants of all ranks have sent to this rank's positions; see
        SidecarCache."""
        if self.forms[layer] is not Form.POSITIONS:
            return super().take(layer, index)
        total, width = self.sent(layer, index), self._arenas[layer].width
        if total is None:
            return None
        (both,) = self.exchange.reduce_scatter(total).wait()
        return both[..., :width], both[..., width:]

    def sent(self, layer: int, index: int) -> Tensor | None:
        """This rank's sums of gK and gV of a segment, in the order of an exchange; only once."""
        sums = super().take(layer, index)
        if sums is None:
            return None
        both = torch.cat(sums, dim=-1)
        rows = self.exchange.table("dealt", self.map.lengths[index], both.device)
        return both.index_select(0, rows)

    def clear(self) -> None:
        """See SidecarCache."""
        super().clear()
        self._coming.clear()

    def _expect_coming(self, layer: int, index: int, both: Sequence[Tensor]) -> None:
        """Starts to gather K and V if that has not begun, and they are not here."""
        if self.state(layer, index) is SegmentState.EMPTY and (layer, index) not in self._coming:
            self._coming[layer, index] = self.exchange.gather(*both)


class _OwnRows(OwnView):
    """The own K/V of an inner segment, which are kept."""

    def __init__(self, cache: GatheredCache, layer: int, index: int, both: Both) -> None:
        OwnKeys.__init__(self, both)
        self._exchange, self._lengths = cache.exchange, cache.map.lengths[index]
        self._cache, self._place, self._width = cache, (layer, index), both[0].shape[-1]

    def runs(self) -> Both:
        """See OwnView."""
        self._cache.capture(*self._place, self._both)
        key, value = self._cache.own(*self._place)
        rows = self._exchange.table("own in order", self._lengths, key.device)
        return key.index_select(0, rows), value.index_select(0, rows)

    def _begun(self) -> Tensor | None:
        """See OwnView: what descendants have sent."""
        return self._cache.sent(*self._place)
