"""Context-parallel ranks that keep all positions of every inner segment (cp_reduce "segment")."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_prefix.sidecar.arena import Arena, Both, Payload
from megatron_prefix.sidecar.cache import SegmentState, SidecarCache
from megatron_prefix.sidecar.context_parallel import Exchange, GatheredKeys, Pending
from megatron_prefix.sidecar.key_sums import halves
from megatron_prefix.sidecar.store import Lengths, OwnKeys


class GatheredStore:
    """A layer of which every rank keeps all positions; see Store.

    Readers exchange nothing. What descendants send is summed here and crosses once, in the
    backward of the segment, together with what its own attention gives.

    Args:
        exchange: the group's collectives.
        arena: for whole segments; the queries that read it are this rank's.
        lengths: of every segment's spans, whole.
    """

    def __init__(self, exchange: Exchange, arena: Arena, lengths: tuple[Lengths, ...]) -> None:
        self.exchange, self.lengths, self._arena = exchange, lengths, arena
        self._coming: dict[int, Pending] = {}
        self.own, self.read, self.add = arena.own, arena.read, arena.add
        self.looks_ahead, self.fetch, self.leave = arena.looks_ahead, arena.fetch, arena.leave

    @property
    def num_bytes(self) -> int:
        """See Store."""
        return self._arena.num_bytes + sum(one.num_bytes for one in self._coming.values())

    def keys(self, cache: SidecarCache, layer: int, index: int, inner: bool, both: Both) -> OwnKeys:
        """See SidecarCache.own_keys."""
        if not inner:
            return GatheredKeys(self.exchange, self.lengths[index], both)
        return KeptKeys(self, cache, layer, index, both)

    def expect(self, index: int, both: Payload) -> None:
        """Starts to gather what `write` will be called with."""
        if index not in self._coming:
            self._coming[index] = self.exchange.gather(*both)

    def write(self, index: int, payload: Payload) -> None:
        """See Store: keeps the K and V of all ranks."""
        self.expect(index, payload)
        (view,) = self._coming.pop(index).wait()
        whole = view.index_select(0, self.exchange.table("order", self.lengths[index], view.device))
        self._arena.write(index, halves(whole, payload[0].shape[-1]))

    def sums(self, index: int) -> Tensor | None:
        """This rank's sums of gK and gV of a whole segment, in the order of an exchange."""
        sums = self._arena.sent(index)
        if sums is None:
            return None
        both = torch.cat(sums, dim=-1)
        return both.index_select(0, self.exchange.table("dealt", self.lengths[index], both.device))

    def sent(self, index: int) -> Payload | None:
        """See Store: what descendants on all ranks have sent."""
        total = self.sums(index)
        if total is None:
            return None
        (both,) = self.exchange.reduce_scatter(total).wait()
        return halves(both, self._arena.width)

    def drop(self) -> None:
        """See Store."""
        self._arena.drop()
        self._coming.clear()


class KeptKeys:
    """The own K and V of an inner segment, which are kept; see SidecarCache.own_keys."""

    def __init__(
        self, store: GatheredStore, cache: SidecarCache, layer: int, index: int, both: Both
    ) -> None:
        self._store, self._cache, self._place, self._both = store, cache, (layer, index), both
        self._exchange, self._lengths = store.exchange, store.lengths[index]
        if cache.state(layer, index) is SegmentState.EMPTY:
            store.expect(index, both)

    def runs(self) -> Both:
        """See OwnKeys: captures what has come."""
        self._cache.capture(*self._place, self._both)
        key, value = self._cache.own(*self._place)
        rows = self._exchange.table("own in order", self._lengths, key.device)
        return key.index_select(0, rows), value.index_select(0, rows)

    def send(self, gradients: Both) -> None:
        """Starts to send the gradients of `runs`, and what descendants have sent."""
        self._cache.consume(*self._place)
        begin = self._store.sums(self._place[1])
        self._coming = self._exchange.send_runs(gradients, self._lengths, begin)

    def take(self) -> Both:
        """See OwnKeys; in fp32 or wider."""
        (both,) = self._coming.wait()
        return halves(both, self._both[0].shape[-1])
