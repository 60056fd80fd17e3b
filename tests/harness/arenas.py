"""Watches what a step keeps outside of autograd: its arenas, and what takes tensors to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_prefix.features.host.segment import Offloader
from megatron_prefix.sidecar.arena import Arena

Seen = Callable[[Tensor], Any]


class Storages:
    """Memory on the device that must not outlive a step."""

    def __init__(self) -> None:
        self.seen: set[StorageWeakRef] = set()

    def add(self, tensor: Tensor) -> None:
        """Remembers the memory of a tensor, without holding it."""
        self.seen.add(StorageWeakRef(tensor.untyped_storage()))

    @property
    def num_alive(self) -> int:
        """How many of them something still refers to."""
        return sum(not storage.expired() for storage in self.seen)


def watch_arenas(patch: pytest.MonkeyPatch, payload: Seen, gradient: Seen | None = None) -> None:
    """Calls `payload` and `gradient` with what an arena takes on the device."""
    allocate = Arena.allocate

    def allocated(self: Arena, likes: Any, *, sums: bool = False) -> None:
        allocate(self, likes, sums=sums)
        for tensor in self.sums if sums else self.values:
            (gradient or id if sums else payload)(tensor)

    patch.setattr(Arena, "allocate", allocated)


def offloaders(patch: pytest.MonkeyPatch) -> list[Offloader]:
    """All that take tensors to the host from now on, each once."""
    found: list[Offloader] = []
    begin = Offloader.begin_step

    def watched(self: Offloader, *given: float) -> None:
        if self not in found:
            found.append(self)
        begin(self, *given)

    patch.setattr(Offloader, "begin_step", watched)
    return found
