"""The arena of a layer: one block of memory for the payloads of all inner segments that wait for
their backward, and one for their gradients. Where a segment lies is planned (tree/payload_map.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatron_prefix.tree.cp_layout import Index
from megatron_prefix.tree.payload_map import RowMap

if TYPE_CHECKING:
    from megatron_prefix.sidecar.cache import SidecarCache

Payload = tuple[Tensor, ...]
"""What a layer leaves in some rows, [rows, ...] each: K and V; or a state and a tail."""
Both = tuple[Tensor, Tensor]
"""Of keys and of values."""
Rows = slice | Tensor
"""Consecutive rows, or an index, int64 [n]."""
Lengths = tuple[int, ...]
"""Of a segment's spans, on all ranks together."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What a segment reads in one go.

    Attributes:
        rows: of the arena, on this rank.
    """

    rows: Rows


@dataclass(frozen=True, eq=False)
class LevelReading(Reading):
    """What a segment sees in one level (megatron_prefix/tree/payload_map.py); rows run after run.

    Attributes:
        index: the segment.
        query_lengths: queries of every run, on this rank.
        key_lengths: keys of every run, of all ranks.
        queries: the queries among the segment's positions on this rank.
    """

    index: int
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    queries: Rows


@dataclass(frozen=True, eq=False)
class TailReading(Reading):
    """What a segment sees of its ancestors' last positions (megatron_prefix/tree/tails.py).

    Attributes:
        spans: see Tail.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]


class OwnKeys(Protocol):
    """A segment's own K and V in one call of its attention, and their gradients."""

    def runs(self) -> Both:
        """K and V of this rank's own runs (`cp_layout.own_runs`), run after run."""

    def send(self, gradients: Both) -> None:
        """Gives the gradients of `runs` to the keys and values."""

    def take(self) -> Both:
        """The gradients of this rank's K and V, those of descendants included; after `send`."""


class LocalKeys:
    """OwnKeys of a single rank, where a run is a whole span; see SidecarCache.own_keys."""

    def __init__(
        self, cache: SidecarCache, place: tuple[int, int], inner: bool, both: Both
    ) -> None:
        if inner:
            cache.capture(*place, both)
            key, value = cache.own(*place)
            both = key, value
        self._cache, self._place, self._inner, self._both = cache, place, inner, both

    def runs(self) -> Both:
        """See OwnKeys."""
        return self._both

    def send(self, gradients: Both) -> None:
        """See OwnKeys."""
        self._both = gradients

    def take(self) -> Both:
        """See OwnKeys."""
        return added(self._both, self._cache.take(*self._place)) if self._inner else self._both


def added(mine: Both, sent: Payload | None) -> Both:
    """Gradients of K and V with those that descendants have sent, which are not rounded before."""
    return mine if sent is None else (sent[0] + mine[0], sent[1] + mine[1])


@dataclass
class DeviceBytes:
    """Device memory of all arenas of a sidecar: bytes held now, and the most so far."""

    held: int = 0
    peak: int = 0

    def add(self, num_bytes: int) -> None:
        """Counts bytes that are taken (negative: freed)."""
        self.held += num_bytes
        self.peak = max(self.peak, self.held)


class Arena:
    """Payloads of one layer, and their gradients in fp32 or wider. The sidecar checks that they are
    there.

    This one is on the device, and has all that this rank reads. Others are on the host
    (host_arena.py), or context-parallel ranks exchange payloads of positions when they are written
    (gathered.py) or when they are read (sharded.py); states are of heads, and every rank has those
    of its own. The first `write` takes memory for payloads, the first `add` for gradients.

    Args:
        rows: where segments lie.
        device_bytes: counts the memory.

    Attributes:
        rows: as given.
        values: tensors [rows, ...], one for each tensor of a payload; empty without memory.
        sums: their gradients; empty without memory.
        width: numbers in the last dimension of the first of them: of a key in one head.
        looks_ahead: whether `fetch` and `leave` do something.
    """

    looks_ahead, width = False, 0

    def __init__(self, rows: RowMap, device_bytes: DeviceBytes) -> None:
        self.rows, self._device_bytes = rows, device_bytes
        self.values: list[Tensor] = []
        self.sums: list[Tensor] = []

    def keys(self, cache: SidecarCache, place: tuple[int, int], inner: bool, both: Both) -> OwnKeys:
        """See SidecarCache.own_keys; `place`: the layer and the segment."""
        return LocalKeys(cache, place, inner, both)

    def mine(self, index: int) -> Index | None:
        """The rows of this rank's positions among those of a segment, span after span; None: all of
        them."""
        return None

    def write(self, index: int, payload: Payload) -> None:
        """Copies in what a segment leaves on this rank; its gradients are zero from now on."""
        rows = self.rows.intervals[index]
        if rows is None:
            raise RuntimeError(f"segment {index} is a wave: it leaves nothing here")
        if not self.values:
            self.allocate(payload)
        for whole, part in zip(self.values, payload, strict=True):
            whole[rows].copy_(part)
        for total in self.sums:
            total[rows].zero_()

    def own(self, index: int) -> Payload:
        """A segment's payload as it is kept, views."""
        rows = self.rows.intervals[index]
        return tuple([whole[rows] for whole in self.values])

    def read(self, seen: Collection[int], what: Reading) -> Payload:
        """What a segment reads of the segments `seen`, a level of all ranks: views of an interval,
        copies for an index."""
        rows = what.rows
        if isinstance(rows, slice):
            return tuple([whole[rows] for whole in self.values])
        return tuple([whole.index_select(0, rows) for whole in self.values])

    def add(self, seen: Collection[int], what: Reading, gradients: Payload) -> None:
        """Adds gradients of what `read` returns; the rows are all different."""
        rows = what.rows
        if not self.sums:
            if isinstance(rows, slice) and len(gradients[0]) == self.rows.length:
                self.sums = [part.to(wider(part.dtype), copy=True) for part in gradients]
                self._device_bytes.add(_size(self.sums))
                return
            self.allocate(self.values, sums=True)
        for total, part in zip(self.sums, gradients, strict=True):
            if isinstance(rows, slice):
                total[rows].add_(part)
            else:
                total.index_add_(0, rows, part.to(total.dtype))

    def sent(self, index: int) -> Payload | None:
        """Gradients of what a segment has left on this rank, views; None if there are none at
        all."""
        rows = self.rows.intervals[index]
        return tuple([total[rows] for total in self.sums]) or None

    def fetch(
        self, seen: Collection[int], sums: Collection[int], levels: Iterable[LevelReading]
    ) -> None:
        """Starts to get what will be used; the rest comes when it is used.

        Args:
            seen: segments whose payloads will be read.
            sums: segments whose gradients will be read or added to.
            levels: which will be read.
        """

    def leave(self) -> None:
        """Tells that the layer is not used for a while."""

    def drop(self) -> None:
        """Frees all memory."""
        self._device_bytes.add(-_size([*self.values, *self.sums]))
        self.values, self.sums = [], []

    def allocate(self, likes: Sequence[Tensor], *, sums: bool = False) -> None:
        """Takes memory for payloads, or zeros for their gradients.

        Args:
            likes: a payload of any rows; it gives widths, dtypes and the device.
            sums: whether for gradients.
        """
        made = [
            like.new_zeros((self.rows.length, *like.shape[1:]), dtype=wider(like.dtype)) if sums
            else like.new_empty((self.rows.length, *like.shape[1:]))
            for like in likes
        ]  # fmt: skip
        self._device_bytes.add(_size(made))
        with torch.no_grad():
            for whole in made:
                for row in range(self.rows.zeros):
                    whole[row].zero_()
        if sums:
            self.sums = made
        else:
            self.values, self.width = made, made[0].shape[-1]


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])
