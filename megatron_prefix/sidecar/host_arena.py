"""What some layers keep for a step in host memory; on the device only while their layer runs.

K/V and gK/gV of a long prompt, or the states of many spans, are most of a step's memory, and a
layer uses only its own. Layers on the host are spread among the others, so that copies for the next
one run while several layers compute. On the device are the arenas of the layer that runs, of the
next one on the host, and gradients on their way back. Memory that is being copied is held until the
computing stream has waited for the copy, so the next layer can use it again without a wait of the
host.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from megatron_prefix.offload.pool import Lease, StagingPool
from megatron_prefix.offload.segment import Offloader
from megatron_prefix.offload.transfers import Pairs
from megatron_prefix.plan.layer_mix import spread
from megatron_prefix.sidecar.arena import Arena, Payload, Reading, wide
from megatron_prefix.sidecar.store import LocalKeys, Store

PIECE_BYTES = 1 << 26
"""Of one lease of host memory, if a row is not longer."""
LEAVING = 1
"""Visits whose copies to the host may still run."""


class HostLayers:
    """The layers of a model chunk that are on the host, for one step.

    Args:
        offloader: makes copies and has host memory.
        num_layers: layers of the model chunk that keep something, in the order in which they run.
        num_host: how many of them are on the host.
    """

    def __init__(self, offloader: Offloader, num_layers: int, num_host: int) -> None:
        self.transfers, self.pool = offloader.transfers, offloader.pool
        self._counts = offloader.counts
        self._layers = spread(num_layers, num_host)
        self._leaving: collections.deque[tuple[Any, Sequence[Tensor]]] = collections.deque()

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def near(self, layer: int, backward: bool) -> int | None:
        """The next layer on the host from `layer` on, in the order in which layers run."""
        if backward:
            return max((number for number in self._layers if number <= layer), default=None)
        return min((number for number in self._layers if number >= layer), default=None)

    def keep(self, layer: int, arena: Arena) -> Store:
        """Where a layer's arena is: on the host, or on the device as it is given."""
        return HostArena(arena, self) if layer in self._layers else arena

    def hold(self, mark: Any, tensors: Sequence[Tensor]) -> None:
        """Keeps tensors until their copies to the host have been waited for."""
        self._counts.stored += sum(tensor.nbytes for tensor in tensors)
        self._leaving.append((mark, tensors))
        self._settle(LEAVING)

    def clear(self) -> None:
        """Waits for all copies."""
        self._settle(0)

    def _settle(self, left: int) -> None:
        while len(self._leaving) > left:
            mark, _ = self._leaving[0]
            self.transfers.wait(mark)
            self._leaving.popleft()


class HostArena:
    """An arena that is kept on the host; see Store.

    It is on the device during a visit, which begins with `fetch` or the first use, and ends with
    `leave`.

    Args:
        arena: on the device, without memory.
        host: makes the copies.
    """

    keys, looks_ahead = LocalKeys, True

    def __init__(self, arena: Arena, host: HostLayers) -> None:
        self._arena, self._host = arena, host
        self._likes: list[Tensor] = []  # a payload without rows
        self._values: _OnHost | None = None
        self._sums: _OnHost | None = None
        self._loaded: set[int] = set()  # segments whose payloads are on the device
        self._summed: set[int] = set()  # segments whose gradients are on the host
        self._sums_loaded: set[int] = set()  # of these, whose are on the device, too
        self._changed: set[int] = set()  # segments whose gradients on the device are newer
        self._pending: list[Any] = []

    @property
    def num_bytes(self) -> int:
        """See Store."""
        return self._arena.num_bytes

    def write(self, index: int, payload: Payload) -> None:
        """Copies a segment's payload to its rows, and from there to the host."""
        arena = self._arena
        if self._values is None:
            self._likes = [like.new_empty((0, *like.shape[1:])) for like in payload]
            self._values = _OnHost(self._host, arena.rows.length, self._likes)
        elif not arena.values:
            arena.allocate(self._likes)
        arena.write(index, payload)
        self._loaded.add(index)
        # Clones: else the whole arena would have to stay until they are on the host.
        (rows,) = self._merged([index])
        self._values.store([whole[rows].clone() for whole in arena.values], rows)

    def own(self, index: int) -> Payload:
        """See Store."""
        self.fetch((index,))
        self._arrive()
        return self._arena.own(index)

    def read(self, seen: Iterable[int], what: Reading) -> Payload:
        """See Store."""
        self.fetch(seen)
        self._arrive()
        return self._arena.read(seen, what)

    def add(self, seen: Iterable[int], what: Reading, gradients: Payload) -> None:
        """See Store."""
        self.fetch((), seen)
        self._arrive()
        self._arena.add(seen, what, gradients)
        self._changed.update(seen)

    def sent(self, index: int) -> Payload | None:
        """See Store; the views last until `leave`."""
        if not (self._summed or self._arena.sums):
            return None
        self.fetch((), (index,))
        self._arrive()
        return self._arena.sent(index)

    def fetch(
        self, seen: Iterable[int], sums: Iterable[int] = (), levels: Iterable[Reading] = ()
    ) -> None:
        """Goes on with a visit: loads payloads of segments, and gradients of others."""
        arena, wanted = self._arena, [index for index in seen if index not in self._loaded]
        if wanted and self._values is not None:
            if not arena.values:
                arena.allocate(self._likes)
            self._load(self._values, arena.values, wanted)
            self._loaded.update(wanted)
        sums = {*sums}
        if sums and not arena.sums:
            arena.allocate(self._likes, sums=True)
        missing = (self._summed & sums) - self._sums_loaded
        if missing and self._sums is not None:
            self._load(self._sums, arena.sums, missing)
            self._sums_loaded |= missing

    def leave(self) -> None:
        """Ends a visit: changed gradients are copied to the host, device memory is freed."""
        self._arrive()
        for rows in self._merged(self._changed):
            if self._sums is None:
                likes = [like.to(wide(like)) for like in self._likes]
                self._sums = _OnHost(self._host, self._arena.rows.length, likes)
            self._sums.store([total[rows] for total in self._arena.sums], rows)
        self._summed |= self._changed
        self._changed.clear()
        self._sums_loaded.clear()
        self._loaded.clear()
        self._arena.drop()

    def drop(self) -> None:
        """See Store."""
        self._changed.clear()  # the gradients are not needed any more
        self.leave()
        self._summed.clear()
        self._values = self._sums = None

    def _load(self, there: _OnHost, tensors: Sequence[Tensor], segments: Iterable[int]) -> None:
        for rows in self._merged(segments):
            self._pending.append(there.load(tensors, rows))

    def _merged(self, segments: Iterable[int]) -> list[slice]:
        """The rows of segments; neighbours are one interval, and one copy."""
        merged: list[slice] = []
        intervals = [rows for index in segments if (rows := self._arena.rows.intervals[index])]
        for start, stop in sorted([(rows.start, rows.stop) for rows in intervals]):
            if merged and merged[-1].stop == start:
                merged[-1] = slice(merged[-1].start, stop)
            else:
                merged.append(slice(start, stop))
        return merged

    def _arrive(self) -> None:
        """Makes the computing stream wait for the loads."""
        for mark in self._pending:
            self._host.transfers.wait(mark)
        self._pending.clear()


class _OnHost:
    """A payload of an arena on the host, or its gradients.

    Args:
        host: the layers on the host.
        length: rows of the arena.
        likes: tensors; they give the shape of a position and the dtype.
    """

    def __init__(self, host: HostLayers, length: int, likes: Sequence[Tensor]) -> None:
        self._host, self._stored = host, None
        self._buffers = [_HostBuffer(host.pool, length, like) for like in likes]

    def store(self, tensors: Sequence[Tensor], span: slice) -> None:
        """Copies tensors to the positions `span`, and holds them until that is done."""
        self._stored = self._host.transfers.store(self._pairs(tensors, span), held=True)
        self._host.hold(self._stored, tensors)

    def load(self, tensors: Sequence[Tensor], span: slice) -> Any:
        """Copies the positions `span` to the same positions of tensors on the device.

        Returns:
            A mark to wait for.
        """
        pairs = self._pairs([tensor[span] for tensor in tensors], span)
        return self._host.transfers.fill(pairs, self._stored)

    def _pairs(self, tensors: Sequence[Tensor], span: slice) -> Pairs:
        both = zip(tensors, self._buffers, strict=True)
        return [pair for tensor, host in both for pair in host.pairs(tensor, span)]


class _HostBuffer:
    """[positions, ...] on the host, in pieces leased from a pool.

    Args:
        pool: of host memory.
        length: positions.
        like: a tensor; it gives the shape of a position and the dtype.
    """

    def __init__(self, pool: StagingPool, length: int, like: Tensor) -> None:
        self._shape, self._dtype = like.shape[1:], like.dtype
        size = self._shape.numel() * like.element_size()
        self._piece = max(1, PIECE_BYTES // size)
        self._leases: list[Lease] = [
            pool.take(min(self._piece, length - start) * size)
            for start in range(0, length, self._piece)
        ]

    def pairs(self, device: Tensor, span: slice) -> Pairs:
        """(device, host) pairs: a tensor on the device, and the positions `span` on the host."""
        found = []
        for number, lease in enumerate(self._leases):
            first = number * self._piece
            start, stop = max(span.start, first), min(span.stop, first + self._piece)
            if start < stop:
                host = lease.tensor.view(self._dtype).view(-1, *self._shape)
                there, here = (slice(start - at, stop - at) for at in (first, span.start))
                found.append((device[here], host[there]))
        return found
