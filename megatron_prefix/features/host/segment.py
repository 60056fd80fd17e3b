"""Copies the saved tensors of one segment to the host and back.

Autograd's saved-tensor hooks see everything that the decoder saves. A storage is copied once, even
if several views of it are saved. When a layer has run, what it saved is copied to the host and
freed on the device. In the segment's backward, layers are loaded before they are needed, the first
of them into memory that the backward before it frees; if there is no room, when they are needed.

Never offloaded: parameters and buffers; the stage's input, which the schedule holds anyway; small
tensors; and what Megatron's selective recomputation discards and fills again. K/V are in the
sidecar and are not saved tensors.

An entry lives as long as autograd holds it: after a layer's backward its memory is freed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_prefix.features.host.pool import Lease, StagingPool
from megatron_prefix.features.host.transfers import Transfers

LAYERS_AHEAD = 2
"""Layers that are loaded while the backward of one layer runs."""


@dataclass
class Counts:
    """Bytes that one step has copied.

    Attributes:
        stored: to the host.
        prefetched: back, before their use.
        on_demand: back, when they were needed.
        num_delayed: prefetches delayed because the device had no room.
    """

    stored: int = 0
    prefetched: int = 0
    on_demand: int = 0
    num_delayed: int = 0


class StorageState(Enum):
    """Where one saved storage is."""

    STAGED = "staged"  # on the device; its layer still runs
    KEPT = "kept"  # stays on the device: its owner discards it and fills it again
    OFFLOADED = "offloaded"  # on the host, or being copied there
    LOADED = "loaded"  # on the device again


_NEXT = {
    StorageState.STAGED: {StorageState.OFFLOADED, StorageState.KEPT},
    StorageState.OFFLOADED: {StorageState.LOADED},
    StorageState.KEPT: set(),
    StorageState.LOADED: set(),
}


@dataclass(eq=False)
class SavedStorage:
    """One saved storage.

    Attributes:
        state: where it is.
        tensor: a tensor with this storage, while it is on the device.
        version: of `tensor` when it was saved.
        num_bytes: of the storage when it was saved.
        lease: its memory on the host.
        layer: number of the last layer that saved it, whose backward needs it first.
        mark: of a running copy, for `Transfers`.
    """

    state: StorageState
    tensor: Tensor | None
    version: int
    num_bytes: int
    lease: Lease | None = None
    layer: int = 0
    mark: Any = None

    def become(self, state: StorageState) -> None:
        """Changes the state.

        Raises:
            RuntimeError: this change is not allowed.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(
                f"a saved tensor is {self.state.value} and cannot become {state.value}"
            )
        self.state = state

    def as_bytes(self) -> Tensor | None:
        """The storage as uint8 [num_bytes]; None if its owner has discarded it.

        Raises:
            RuntimeError: it was changed in place after it was saved.
        """
        tensor = self.tensor
        if tensor is None:
            raise RuntimeError("a staged tensor is not there")
        storage = tensor.untyped_storage()
        if storage.nbytes() != self.num_bytes:
            return None
        if tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {tuple(tensor.shape)} that backward needs was changed in place after it"
                " was saved"
            )
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


class _Handle(NamedTuple):
    """What autograd keeps instead of a saved tensor."""

    entry: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class Offloader:
    """What the offloaded segments of a device share; it is kept across steps.

    Attributes:
        transfers: makes the copies.
        pool: host memory.
        counts: of the current step.
    """

    transfers: Transfers
    pool: StagingPool = field(init=False)
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.pool = StagingPool(self.transfers.pinned)

    def begin_step(self, expected: float = 0.0, staged: float = 0.0) -> None:
        """Call it before the first segment of a step.

        Args:
            expected: predicted peak of the step on the device, bytes.
            staged: predicted peak on the host, bytes.
        """
        self.counts = Counts()
        self.transfers.begin_step(expected)
        self.pool.begin_step(staged)

    def end_step(self) -> None:
        """Call it after a step, also after one that failed."""
        self.transfers.end_step()

    def segment(self, resident: set[int]) -> OffloadedSegment:
        """A segment's tensors.

        Args:
            resident: addresses of storages that stay on the device (`addresses`).
        """
        return OffloadedSegment(self, resident)


def addresses(*tensors: Tensor | None) -> set[int]:
    """Addresses of the storages of tensors; valid while the tensors live."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}


class OffloadedSegment:
    """The saved tensors of one segment on one stage; see the top of the file."""

    def __init__(self, owner: Offloader, resident: set[int]) -> None:
        self._owner, self._resident = owner, resident
        # Weak keys and values: a freed storage is no longer known, and an entry that autograd drops
        # is dropped here.
        self._known: weakref.WeakValueDictionary[tuple[StorageWeakRef, int], SavedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._open: list[SavedStorage] = []
        self._layers: list[list[weakref.ref[SavedStorage]]] = []
        self._recording = False

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Surrounds the forward whose saved tensors are offloaded."""
        self._recording = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
            self.layer_done()
        finally:
            self._recording = False
            self._open.clear()

    def layer_done(self) -> None:
        """Call it after a layer: copies what the layer saved to the host."""
        if not (self._recording and self._open):
            return
        pairs, stored = [], []
        for entry in self._open:
            entry.layer = len(self._layers)
            if entry.state is not StorageState.STAGED:  # saved by an earlier layer, too
                continue
            device = entry.as_bytes()
            if device is None:
                entry.become(StorageState.KEPT)
                continue
            entry.lease = self._owner.pool.take(entry.num_bytes)
            pairs.append((device, entry.lease.tensor))
            stored.append(entry)
        self._layers.append([weakref.ref(entry) for entry in self._open])
        self._open.clear()
        if not stored:
            return
        mark = self._owner.transfers.store(pairs)
        for entry in stored:
            entry.become(StorageState.OFFLOADED)
            entry.mark, entry.tensor = mark, None
            self._owner.counts.stored += entry.num_bytes
        del pairs, device
        self._owner.transfers.keep_limit()

    def prefetch(self, *, early: bool = False) -> None:
        """Loads layers, the last one first, as far as there is room.

        Args:
            early: the backward before this one still runs and frees memory: load as many layers as
                fit the predicted peak of the step.
        """
        self._load_before(len(self._layers), early)

    # Hooks ----------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        if not self._takes(tensor):
            return tensor if tensor.is_leaf else tensor.detach()
        key = StorageWeakRef(tensor.untyped_storage()), tensor._version
        entry = self._known.get(key)
        if entry is None:
            source = tensor.detach()
            size = tensor.untyped_storage().nbytes()
            entry = self._known[key] = SavedStorage(
                StorageState.STAGED, source, tensor._version, size
            )
        if not any(entry is other for other in self._open):
            self._open.append(entry)
        offset = int(tensor.storage_offset())
        return _Handle(entry, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _takes(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or type(tensor) is not Tensor:
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= self._owner.transfers.least_bytes
            and storage.data_ptr() not in self._resident
        )

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Handle):
            return saved
        entry = saved.entry
        if entry.state is StorageState.OFFLOADED:
            self._demand(entry)
        if entry.state is StorageState.LOADED:
            if entry.mark is not None:
                self._owner.transfers.wait(entry.mark)
                entry.mark = None
            self._load_before(entry.layer, early=False)
        if entry.tensor is None:
            raise RuntimeError(
                f"an offloaded tensor is {entry.state.value} but has no memory on the device"
            )
        storage = entry.tensor.untyped_storage()
        if storage.nbytes() != entry.num_bytes:
            raise RuntimeError("a discarded tensor is needed before it has been filled again")
        view = torch.empty(0, dtype=saved.dtype, device=entry.tensor.device)
        return view.set_(storage, saved.offset, saved.size, saved.stride)

    # Loads ----------------------------------------------------------------------------------------

    def _demand(self, entry: SavedStorage) -> None:
        """Loads a tensor that is needed now, and the rest of its layer if there is room."""
        layer = self._waiting(entry.layer)
        fits = sum(other.num_bytes for other in layer) <= self._owner.transfers.room()
        for other in layer if fits else [entry]:
            self._load(other)
            self._owner.counts.on_demand += other.num_bytes

    def _load_before(self, layer: int, early: bool) -> None:
        """Prefetches the layers before one, the nearest first."""
        counts = self._owner.counts
        last = 0 if early else max(0, layer - LAYERS_AHEAD)
        for number in range(layer - 1, last - 1, -1):
            waiting = self._waiting(number)
            size = sum(entry.num_bytes for entry in waiting)
            if not size:
                continue
            if size > self._owner.transfers.room(as_planned=early):
                counts.num_delayed += 1
                return
            for entry in waiting:
                self._load(entry)
            counts.prefetched += size

    def _waiting(self, layer: int) -> list[SavedStorage]:
        """Entries of a layer that are on the host and that autograd will need."""
        entries = (reference() for reference in self._layers[layer])
        return [
            entry
            for entry in entries
            if entry is not None and entry.layer == layer and entry.state is StorageState.OFFLOADED
        ]

    def _load(self, entry: SavedStorage) -> None:
        if entry.lease is None:
            raise RuntimeError("an offloaded tensor has no host memory")
        entry.tensor, entry.mark = self._owner.transfers.load(entry.lease.tensor, entry.mark)
        entry.become(StorageState.LOADED)
        entry.lease = None
