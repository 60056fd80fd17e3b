"""The arena of a layer: one block of memory for the payloads of all inner segments that wait for
their backward, and one for their gradients, at places planned by tree/payload_map.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatron_prefix.tree.payload_map import RowMap

if TYPE_CHECKING:
    from megatron_prefix.sidecar.cache import SidecarCache

Payload = tuple[Tensor, ...]
"""Tensors [rows, ...] of one layer: K and V; or a state and a convolution's tail."""
KeyValue = tuple[Tensor, Tensor]
"""K and V, or their gradients."""
Rows = slice | Tensor
"""Consecutive rows, or an index, int64 [n]."""
Lengths = tuple[int, ...]
"""Of a segment's spans, on all ranks together."""


@dataclass(frozen=True, eq=False)
class Reading:
    """Rows of this rank's arena that a segment reads in one go."""

    rows: Rows


@dataclass(frozen=True, eq=False)
class LevelReading(Reading):
    """A level of a segment (tree/payload_map.py); rows run after run.

    Attributes:
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
    """Window keys of a segment; `spans` as in tree/tails.py `Tail`."""

    spans: tuple[tuple[tuple[int, int], ...], ...]


class OwnKeys(Protocol):
    """A segment's own K and V in one call of its attention, and their gradients."""

    def runs(self) -> KeyValue:
        """K and V of this rank's own runs (`cp_layout.own_runs`), run after run."""

    def send(self, gradients: KeyValue) -> None:
        """Takes the gradients of `runs`."""

    def take(self) -> KeyValue:
        """The gradients of this rank's K and V, those of descendants included; after `send`."""


class LocalKeys:
    """Own keys of a single rank, where a run is a whole span."""

    def __init__(
        self, cache: SidecarCache, place: tuple[int, int], inner: bool, key_value: KeyValue
    ) -> None:
        if inner:
            cache.capture(*place, key_value)
            key, value = cache.own(*place)
            key_value = key, value
        self._cache, self._place, self._inner, self._both = cache, place, inner, key_value

    def runs(self) -> KeyValue:
        return self._both

    def send(self, gradients: KeyValue) -> None:
        self._both = gradients

    def take(self) -> KeyValue:
        return (
            with_returned(self._both, self._cache.take(*self._place)) if self._inner else self._both
        )


def with_returned(local: KeyValue, returned: Payload | None) -> KeyValue:
    """Own gradients of K and V plus those that descendants returned, not yet rounded."""
    return local if returned is None else (returned[0] + local[0], returned[1] + local[1])


@dataclass
class DeviceBytes:
    """Device memory of all arenas of a sidecar: bytes now, and at most so far."""

    held: int = 0
    peak: int = 0

    def add(self, num_bytes: int) -> None:
        self.held += num_bytes
        self.peak = max(self.peak, self.held)


class Arena:
    """Payloads of one layer on the device, and their gradients in fp32 or wider.

    The sidecar checks that they are present. Subclasses of features (`LayerArenas`) keep them
    elsewhere, or exchange payloads of positions among context-parallel ranks; of states every rank
    keeps those of its own heads. The first `write` allocates payloads, the first `add` gradients.

    Attributes:
        values: tensors [rows, ...], one for each tensor of a payload; empty without memory.
        width: size of the last dimension of the first tensor: of a key in one head.
        looks_ahead: whether `fetch` and `leave` do something.
    """

    looks_ahead, width = False, 0

    def __init__(self, rows: RowMap, device_bytes: DeviceBytes) -> None:
        self.rows, self._device_bytes = rows, device_bytes
        self.values: list[Tensor] = []
        self.sums: list[Tensor] = []

    def keys(
        self, cache: SidecarCache, place: tuple[int, int], inner: bool, key_value: KeyValue
    ) -> OwnKeys:
        """As `SidecarCache.own_keys`; `place`: (layer, segment)."""
        return LocalKeys(cache, place, inner, key_value)

    def write(self, index: int, payload: Payload) -> None:
        """Copies a segment's payload in and zeroes its gradients."""
        rows = self.rows.intervals[index]
        if rows is None:
            raise RuntimeError(f"segment {index} is a wave: it leaves nothing here")
        if not self.values:
            self.allocate(payload)
        for values, part in zip(self.values, payload, strict=True):
            values[rows].copy_(part)
        for total in self.sums:
            total[rows].zero_()

    def own(self, index: int) -> Payload:
        rows = self.rows.intervals[index]
        return tuple([values[rows] for values in self.values])

    def read(self, visible: Collection[int], what: Reading) -> Payload:
        """The rows of `what`, which lie in segments `visible`: views of an interval, copies for an
        index; of a level those of all ranks."""
        rows = what.rows
        if isinstance(rows, slice):
            return tuple([values[rows] for values in self.values])
        return tuple([values.index_select(0, rows) for values in self.values])

    def add(self, visible: Collection[int], what: Reading, gradients: Payload) -> None:
        """Adds gradients of what `read` returns; rows are unique."""
        rows = what.rows
        if not self.sums:
            if isinstance(rows, slice) and len(gradients[0]) == self.rows.length:
                self.sums = [part.to(wider(part.dtype), copy=True) for part in gradients]
                self._device_bytes.add(_num_bytes(self.sums))
                return
            self.allocate(self.values, sums=True)
        for total, part in zip(self.sums, gradients, strict=True):
            if isinstance(rows, slice):
                total[rows].add_(part)
            else:
                total.index_add_(0, rows, part.to(total.dtype))

    def sent(self, index: int) -> Payload | None:
        """Summed gradients of a segment's payload on this rank, views; None: nothing was added."""
        rows = self.rows.intervals[index]
        return tuple([total[rows] for total in self.sums]) or None

    def fetch(
        self, visible: Collection[int], sums: Collection[int], levels: Iterable[LevelReading]
    ) -> None:
        """Starts to bring payloads of `visible`, gradients of `sums` and `levels` to the device."""

    def leave(self) -> None:
        """Marks the layer as unused for a while."""

    def drop(self) -> None:
        self._device_bytes.add(-_num_bytes([*self.values, *self.sums]))
        self.values, self.sums = [], []

    def allocate(self, likes: Sequence[Tensor], *, sums: bool = False) -> None:
        """Allocates payloads, or with `sums` their zeroed gradients; widths, dtypes and device as
        of `likes`, a payload of any rows."""
        tensors = [
            like.new_zeros((self.rows.length, *like.shape[1:]), dtype=wider(like.dtype)) if sums
            else like.new_empty((self.rows.length, *like.shape[1:]))
            for like in likes
        ]  # fmt: skip
        self._device_bytes.add(_num_bytes(tensors))
        with torch.no_grad():
            for tensor in tensors:
                for row in range(self.rows.zeros):
                    tensor[row].zero_()
        if sums:
            self.sums = tensors
        else:
            self.values, self.width = tensors, tensors[0].shape[-1]


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


def summed(gradient: Tensor, numbers: Tensor | None) -> Tensor:
    """Sums of runs of neighbouring rows, in fp32 or wider and always in one order: [runs, ...].

    Args:
        gradient: [rows, ...].
        numbers: rows of every run, int64 [runs]; None: each row is a run, and stays as it is.
    """
    if numbers is None:
        return gradient
    # Not checked: that would make the host wait.
    flat = gradient.flatten(1).to(wider(gradient.dtype))
    sums = torch.segment_reduce(flat, "sum", lengths=numbers, axis=0, unsafe=True)
    return sums.unflatten(1, gradient.shape[1:])


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])


class LayerArenas(Protocol):
    """What makes the arenas of some layers of a model chunk, for one step."""

    def __contains__(self, layer: int) -> bool: ...

    def near(self, layer: int, backward: bool) -> int | None:
        """The layer whose arena is to be announced when `layer` is about to run, this one or a
        later one in the order in which layers run; None: none."""
        ...

    def arena(self, layer: int, rows: RowMap, device_bytes: DeviceBytes) -> Arena: ...

    def clear(self) -> None: ...
