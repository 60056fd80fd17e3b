"""Counts the bytes that autograd holds for backward; on a CPU this replaces a measured peak."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

RECENT = 64
"""Storages saved last, whose owner may still empty them (features/recompute_act)."""


class _Held:
    """One storage that autograd holds, and in a list its bytes as they were counted last."""

    __slots__ = ("__weakref__", "counted", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.counted = tensor, [0]


class SavedBytes:
    """Bytes of the storages that autograd has saved, each counted once, and not while it is empty:
    some are emptied soon after they were saved, and filled before they are read.

    Args:
        resident: addresses of storages that are not counted, those of parameters
            (`segment.addresses`).
        noted: called when another number of bytes is held.

    Attributes:
        now: bytes held now.
        peak: the most bytes held at once.
    """

    def __init__(self, resident: set[int], noted: Callable[[], None] = lambda: None) -> None:
        self._resident, self._noted = resident, noted
        self._known: weakref.WeakValueDictionary[StorageWeakRef, _Held] = (
            weakref.WeakValueDictionary()
        )
        self._recent: collections.deque[weakref.ref[_Held]] = collections.deque(maxlen=RECENT)
        self.now = self.peak = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[SavedBytes]:
        """Counts what autograd saves inside, except what other hooks take."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield self

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        tensor = tensor if tensor.is_leaf else tensor.detach()
        if storage.data_ptr() in self._resident:
            return tensor, None
        key = StorageWeakRef(storage)
        held = self._known.get(key)
        if held is None:
            held = self._known[key] = _Held(tensor)
            weakref.finalize(held, self._dropped, held.counted)
            self._recent.append(weakref.ref(held))
            self.look()
        return tensor, held

    def look(self) -> None:
        """Counts once more what may have been emptied."""
        self._count(*(held() for held in self._recent))

    def _unpack(self, saved: tuple[Tensor, _Held | None]) -> Tensor:
        self._count(saved[1])
        return saved[0]

    def _count(self, *some: _Held | None) -> None:
        for held in some:
            if held is not None:
                num_bytes = held.tensor.untyped_storage().nbytes()
                self.now += num_bytes - held.counted[0]
                held.counted[0] = num_bytes
        self.peak = max(self.peak, self.now)
        self._noted()

    def _dropped(self, counted: list[int]) -> None:
        self.now -= counted[0]
