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
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from megatron_prefix.features.host.pool import Lease, StagingPool
from megatron_prefix.features.host.segment import Offloader
from megatron_prefix.features.host.transfers import Pairs
from megatron_prefix.plan.sizes import spread_evenly
from megatron_prefix.sidecar.arena import Arena, DeviceBytes, LevelReading, Payload, Reading, wider
from megatron_prefix.tree.payload_map import RowMap

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
        self._layers = spread_evenly(num_layers, num_host)
        self._leaving: collections.deque[tuple[Any, Sequence[Tensor]]] = collections.deque()

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def near(self, layer: int, backward: bool) -> int | None:
        """The next layer on the host from `layer` on, in the order in which layers run."""
        if backward:
            return max((number for number in self._layers if number <= layer), default=None)
        return min((number for number in self._layers if number >= layer), default=None)

    def arena(self, layer: int, rows: RowMap, device_bytes: DeviceBytes) -> Arena:
        """The arena of one of these layers; arguments as of Arena."""
        return HostArena(rows, device_bytes, self)

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


class HostArena(Arena):
    """An arena that is kept on the host.

    It is on the device during a visit, which begins with `fetch` or the first use, and ends with
    `leave`.

    Args:
        rows, device_bytes: see Arena.
        host: the layers on the host.
    """

    looks_ahead = True

    def __init__(self, rows: RowMap, device_bytes: DeviceBytes, host: HostLayers) -> None:
        super().__init__(rows, device_bytes)
        self._host = host
        self._likes: list[Tensor] = []  # a payload without rows
        self._host_values, self._host_sums = _HostCopy(host, rows), _HostCopy(host, rows)
        self._changed: set[int] = set()  # segments whose gradients on the device are newer
        self._pending: list[Any] = []

    def write(self, index: int, payload: Payload) -> None:
        """See Arena; from the device it is copied to the host."""
        if not self._likes:
            self._likes = [like.new_empty((0, *like.shape[1:])) for like in payload]
            self._host_values.lease(self._likes)
        elif not self.values:
            self.allocate(self._likes)
        super().write(index, payload)
        self._host_values.loaded.add(index)
        # Clones: else the whole arena would have to stay until they are on the host.
        self._host_values.store({index}, lambda rows: [full[rows].clone() for full in self.values])

    def own(self, index: int) -> Payload:
        self._use((index,), ())
        return super().own(index)

    def read(self, seen: Collection[int], what: Reading) -> Payload:
        self._use(seen, ())
        return super().read(seen, what)

    def add(self, seen: Collection[int], what: Reading, gradients: Payload) -> None:
        self._use((), seen)
        super().add(seen, what, gradients)
        self._changed.update(seen)

    def sent(self, index: int) -> Payload | None:
        """See Arena; the views last until `leave`."""
        if not self._host_sums.stored and not self.sums:
            return None
        self._use((), (index,))
        return super().sent(index)

    def fetch(
        self, seen: Collection[int], sums: Collection[int], levels: Iterable[LevelReading]
    ) -> None:
        """See Arena: goes on with a visit."""
        if missing := self._host_values.missing(seen):
            if not self.values:
                self.allocate(self._likes)
            self._pending += self._host_values.load(missing, self.values)
        if sums and not self.sums:
            self.allocate(self._likes, sums=True)
        if missing := self._host_sums.missing(sums):
            self._pending += self._host_sums.load(missing, self.sums)

    def leave(self) -> None:
        """See Arena: changed gradients are copied to the host, device memory is freed."""
        self._arrive()
        if self._changed and not self._host_sums.stored:
            self._host_sums.lease([like.to(wider(like.dtype)) for like in self._likes])
        self._host_sums.store(self._changed, lambda rows: [total[rows] for total in self.sums])
        self._changed.clear()
        self._host_values.loaded.clear()
        self._host_sums.loaded.clear()
        super().drop()

    def drop(self) -> None:
        self._arrive()
        super().drop()
        self._likes.clear()
        self._changed.clear()
        self._host_values.clear()
        self._host_sums.clear()

    def _use(self, seen: Collection[int], sums: Collection[int]) -> None:
        """Fetches, and makes the computing stream wait for what is on its way."""
        self.fetch(seen, sums, ())
        self._arrive()

    def _arrive(self) -> None:
        for mark in self._pending:
            self._host.transfers.wait(mark)
        self._pending.clear()


class _HostCopy:
    """A copy on the host of an arena's payloads, or of their gradients.

    Args:
        host: the layers on the host.
        rows: where segments lie.

    Attributes:
        stored: the segments that are on the host.
        loaded: those that are on the device, too.
    """

    def __init__(self, host: HostLayers, rows: RowMap) -> None:
        self._host, self._rows, self._mark = host, rows, None
        self._buffers: list[_HostBuffer] = []
        self.stored: set[int] = set()
        self.loaded: set[int] = set()

    def lease(self, likes: Sequence[Tensor]) -> None:
        """Takes host memory for all rows of tensors like these, with any rows."""
        pool, length = self._host.pool, self._rows.length
        self._buffers = [_HostBuffer(pool, length, like) for like in likes]

    def clear(self) -> None:
        """Gives the host memory back."""
        self._buffers.clear()
        self.stored.clear()
        self.loaded.clear()

    def missing(self, segments: Iterable[int]) -> set[int]:
        """Those of the segments that are on the host only."""
        return self.stored.intersection(segments) - self.loaded

    def store(self, segments: set[int], parts: Callable[[slice], list[Tensor]]) -> None:
        """Copies rows of segments, which `parts` returns, and holds them until that is done."""
        for rows in self._merged(segments):
            tensors = parts(rows)
            self._mark = self._host.transfers.store(self._pairs(tensors, rows), held=True)
            self._host.hold(self._mark, tensors)
        self.stored |= segments

    def load(self, segments: set[int], tensors: Sequence[Tensor]) -> list[Any]:
        """Copies segments to their rows of tensors on the device; returns marks to wait for."""
        self.loaded |= segments
        return [
            self._host.transfers.fill(
                self._pairs([full[rows] for full in tensors], rows), self._mark
            )
            for rows in self._merged(segments)
        ]

    def _merged(self, segments: Iterable[int]) -> list[slice]:
        """The rows of segments; neighbours are one interval, and one copy."""
        merged: list[slice] = []
        intervals = [rows for index in segments if (rows := self._rows.intervals[index])]
        for start, stop in sorted([(rows.start, rows.stop) for rows in intervals]):
            if merged and merged[-1].stop == start:
                start = merged.pop().start
            merged.append(slice(start, stop))
        return merged

    def _pairs(self, tensors: Sequence[Tensor], rows: slice) -> Pairs:
        both = zip(tensors, self._buffers, strict=True)
        return [pair for tensor, host in both for pair in host.pairs(tensor, rows)]


class _HostBuffer:
    """[rows, ...] on the host, in pieces leased from a pool.

    Args:
        pool: of host memory.
        length: rows.
        like: a tensor; it gives the shape of a row and the dtype.
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
        """(device, host) pairs: a tensor on the device, and the rows `span` on the host."""
        copies = []
        for number, lease in enumerate(self._leases):
            first = number * self._piece
            start, stop = max(span.start, first), min(span.stop, first + self._piece)
            if start < stop:
                host = lease.tensor.view(self._dtype).view(-1, *self._shape)
                there, here = (slice(start - at, stop - at) for at in (first, span.start))
                copies.append((device[here], host[there]))
        return copies
