"""Copies between a device and the host, and how much room the device has."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]

MARGIN = 0.05
"""Share of a device's memory that no plan and no prefetch counts on: fragments, other libraries."""


class Transfers(Protocol):
    """Copies of one device.

    Attributes:
        pinned: whether host memory should be page-locked.
        least_bytes: smaller tensors stay on the device.
    """

    pinned: bool
    least_bytes: int

    def begin_step(self, expected: float) -> None:
        """Notes what is in use before a step, which is `expected` to take so many bytes more."""

    def store(self, pairs: Pairs, *, held: bool = False) -> Any:
        """Copies (device, host) pairs to the host.

        Args:
            pairs: tensors.
            held: the device's side lives until after a `wait` for the mark; else it may be dropped
                at once.

        Returns:
            A mark for `load`, `fill` and `wait`.
        """

    def keep_limit(self) -> None:
        """Waits for copies to the host while more is in use than a limit allows."""

    def load(self, host: Tensor, stored: Any) -> tuple[Tensor, Any]:
        """Copies to the device what `store` has brought away.

        Returns:
            The tensor, which nobody may read before `wait`, and a mark for `wait`.
        """

    def fill(self, pairs: Pairs, stored: Any) -> Any:
        """Copies (device, host) pairs, stored before the mark, to the device; its side lives until
        after a `wait` for what this returns."""

    def wait(self, mark: Any) -> None:
        """Lets what is computed from here on see what copies have done; the host does not wait."""

    def end_step(self) -> None:
        """Lets go of what was loaded and not waited for."""

    def room(self, *, as_planned: bool = False) -> float:
        """Bytes that can still be allocated.

        Args:
            as_planned: without taking more than the step is expected to.
        """


class HostTransfers:
    """Where there is no device: plain copies.

    Args:
        limit: bytes of room, always; None: what the machine has free.
    """

    pinned = False
    least_bytes = 1

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit

    def begin_step(self, expected: float) -> None:
        """See `Transfers.begin_step`."""

    def store(self, pairs: Pairs, *, held: bool = False) -> None:
        """See `Transfers.store`."""
        for device, host in pairs:
            host.copy_(device)

    def fill(self, pairs: Pairs, stored: None) -> None:
        """See `Transfers.fill`."""
        for device, host in pairs:
            device.copy_(host)

    def keep_limit(self) -> None:
        """See `Transfers.keep_limit`."""

    def load(self, host: Tensor, stored: None) -> tuple[Tensor, None]:
        """See `Transfers.load`."""
        return host.clone(), None

    def wait(self, mark: None) -> None:
        """See `Transfers.wait`."""

    def end_step(self) -> None:
        """See `Transfers.end_step`."""

    def room(self, *, as_planned: bool = False) -> float:
        """See `Transfers.room`."""
        return _free_host_bytes() if self.limit is None else self.limit


class CudaTransfers:
    """Side streams, one for each direction, beside the stream that computes.

    Device memory on both ways belongs to the computing stream's pool.  What is stored is marked as
    used by the side stream, so the allocator hands it out again only when the copy has ended; where
    it runs out of memory, and here where a limit is exceeded, such copies are waited for.  What is
    loaded is held until the computing stream waits for it, and is free after its last use without
    a mark: the host runs ahead of the device, and with one no layer's memory would serve the next.

    Args:
        device: a CUDA device.
        limit: bytes that a step may use; None: all that is free.
    """

    pinned = True
    least_bytes = 1 << 18  # below, a copy costs more than it brings

    def __init__(self, device: torch.device, limit: float | None = None) -> None:
        self._device, self._limit = device, limit
        self._base = self._expected = 0.0
        self._storing, self._loading = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._stored: collections.deque[torch.cuda.Event] = collections.deque()
        self._loaded: dict[int, tuple[torch.cuda.Event, Tensor]] = {}

    def begin_step(self, expected: float) -> None:
        """See `Transfers.begin_step`."""
        self._base = _cuda_memory(self._device)[2]
        self._expected = expected

    def store(self, pairs: Pairs, *, held: bool = False) -> torch.cuda.Event:
        """See `Transfers.store`."""
        # What fills the device's side has been issued; what still reads the host's side of an
        # earlier tensor too.
        self._storing.wait_stream(torch.cuda.current_stream(self._device))
        self._storing.wait_stream(self._loading)
        with torch.cuda.stream(self._storing):
            for device, host in pairs:
                host.copy_(device, non_blocking=True)
                if not held:
                    device.record_stream(self._storing)
        mark = self._storing.record_event()
        if self._limit is not None and not held:
            self._stored.append(mark)
        return mark

    def keep_limit(self) -> None:
        """See `Transfers.keep_limit`."""
        while self._stored and self.room() < 0:
            self._stored.popleft().synchronize()
            torch.empty(1, device=self._device)  # the allocator looks for ended copies when asked

    def load(self, host: Tensor, stored: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        """See `Transfers.load`."""
        current = torch.cuda.current_stream(self._device)
        device = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._loading.wait_stream(current)  # which may still use the memory for something else
        self._loading.wait_event(stored)
        with torch.cuda.stream(self._loading):
            device.copy_(host, non_blocking=True)
        mark = self._loading.record_event()
        self._loaded[id(mark)] = mark, device
        return device, mark

    def fill(self, pairs: Pairs, stored: torch.cuda.Event) -> torch.cuda.Event:
        """See `Transfers.fill`."""
        self._loading.wait_stream(torch.cuda.current_stream(self._device))
        self._loading.wait_event(stored)
        with torch.cuda.stream(self._loading):
            for device, host in pairs:
                device.copy_(host, non_blocking=True)
        return self._loading.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        """See `Transfers.wait`."""
        torch.cuda.current_stream(self._device).wait_event(mark)
        self._loaded.pop(id(mark), None)

    def end_step(self) -> None:
        """See `Transfers.end_step`."""
        for mark, _ in list(self._loaded.values()):
            self.wait(mark)
        self._stored.clear()

    def room(self, *, as_planned: bool = False) -> float:
        """See `Transfers.room`."""
        most, total, used = _cuda_memory(self._device)
        room = most - MARGIN * total
        if self._limit is not None:
            room = min(room, self._base + self._limit)
        if as_planned:
            room = min(room, self._base + self._expected)
        return room - used


def transfers_of(device: torch.device, limit: float | None = None) -> Transfers:
    """How a device's tensors get to the host and back; `limit`: see PrefixConfig.memory_budget."""
    return CudaTransfers(device, limit) if device.type == "cuda" else HostTransfers(limit)


def free_bytes(device: torch.device, limit: float | None = None) -> float:
    """Bytes that a step may still allocate, the margin off; the host does not wait.

    Args:
        device: of the model.
        limit: bytes that a step may use; None: what is free.
    """
    if device.type != "cuda":
        return _free_host_bytes() * (1 - MARGIN) if limit is None else limit
    free, total, used = _cuda_memory(device)
    room = free - used - MARGIN * total
    return room if limit is None else min(room, limit)


def _cuda_memory(device: torch.device) -> tuple[float, float, float]:
    """What the process can have, the device's size, and what is in use ("current", "peak").

    The process can have what the driver calls free and what the allocator has. Memory that waits
    for a copy on a side stream counts as used (`active`).
    """
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    used = stats.get("active_bytes.all.current", 0)
    return free + stats.get("reserved_bytes.all.current", 0), total, used


def _free_host_bytes() -> float:
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
