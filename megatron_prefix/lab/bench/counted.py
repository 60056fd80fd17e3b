"""Counts the bytes that autograd holds for backward; on a CPU this replaces a measured peak."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Held:
    """One storage that autograd holds."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedBytes:
    """Bytes of the storages that autograd has saved, each counted once.

    Args:
        resident: addresses of storages that are not counted, those of parameters
            (`segment.addresses`).

    Attributes:
        now: bytes held now.
        peak: the most bytes held at once.
    """

    def __init__(self, resident: set[int]) -> None:
        self._resident = resident
        self._known: weakref.WeakValueDictionary[StorageWeakRef, _Held] = (
            weakref.WeakValueDictionary()
        )
        self.now = self.peak = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[SavedBytes]:
        """Counts what autograd saves inside, except what other hooks take."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
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
            num_bytes = storage.nbytes()
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(held, self._dropped, num_bytes)
        return tensor, held

    def _dropped(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _unpack(saved: tuple[Tensor, Any]) -> Tensor:
    return saved[0]
