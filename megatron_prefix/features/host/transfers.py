"""Copies between device and host."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.device.memory import MARGIN, cuda_memory, free_host_bytes

Pairs = Sequence[tuple[Tensor, Tensor]]


class Transfers:
    """Makes the copies of one device. These are plain ones, where there is no device.

    Args:
        limit: bytes of room, always; None: the free memory of the machine.

    Attributes:
        pinned: whether host memory must be page-locked.
        least_bytes: smaller tensors stay on the device.
    """

    pinned = False
    least_bytes = 1

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit

    def begin_step(self, expected: float) -> None:
        """Notes the memory in use before a step; `expected`: predicted bytes of the step."""

    def store(self, pairs: Pairs, *, held: bool = False) -> Any:
        """Copies (device, host) pairs to the host.

        Args:
            pairs: tensors.
            held: the caller keeps the device tensors until after a `wait` for the mark; otherwise
                it may drop them at once.

        Returns:
            A mark for `load`, `fill` and `wait`.
        """
        for device, host in pairs:
            host.copy_(device)

    def keep_limit(self) -> None:
        """Waits for copies to the host while more memory is in use than the limit."""

    def load(self, host: Tensor, stored: Any) -> tuple[Tensor, Any]:
        """Copies back to the device what `store` has copied to the host.

        Returns:
            The tensor, to be read only after `wait`, and a mark for `wait`.
        """
        return host.clone(), None

    def fill(self, pairs: Pairs, stored: Any) -> Any:
        """Copies (device, host) pairs, stored before the mark, to the device. The caller keeps the
        device tensors until after a `wait` for the mark that this returns."""
        for device, host in pairs:
            device.copy_(host)

    def wait(self, mark: Any) -> None:
        """Makes the computing stream wait for a copy; the host does not wait."""

    def end_step(self) -> None:
        """Drops loads that nobody has waited for."""

    def room(self, *, as_planned: bool = False) -> float:
        """Bytes that can still be allocated.

        Args:
            as_planned: within the predicted peak of the step.
        """
        return free_host_bytes() if self.limit is None else self.limit


class CudaTransfers(Transfers):
    """Copies on side streams, one for each direction.

    Device memory of both directions belongs to the computing stream's pool. A tensor that is stored
    is marked as used by the side stream, so the allocator reuses its memory only after the copy;
    when memory or the limit is exhausted, such copies are waited for. A tensor that is loaded is
    held until the computing stream waits for it. It is not marked: the host runs ahead of the
    device, and a mark would keep a layer's memory from serving the next layer.

    Args:
        device: a CUDA device.
        limit: bytes that a step may use; None: all that is free.
    """

    pinned = True
    least_bytes = 1 << 18  # a smaller copy costs more than it saves

    def __init__(self, device: torch.device, limit: float | None = None) -> None:
        super().__init__(limit)
        self._device = device
        self._base = self._expected = 0.0
        self._storing, self._loading = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._stored: collections.deque[torch.cuda.Event] = collections.deque()
        self._loaded: dict[int, tuple[torch.cuda.Event, Tensor]] = {}

    def begin_step(self, expected: float) -> None:
        """See `Transfers.begin_step`."""
        self._base = cuda_memory(self._device)[2]
        self._expected = expected

    def store(self, pairs: Pairs, *, held: bool = False) -> torch.cuda.Event:
        """See `Transfers.store`."""
        # Wait for the kernels that write the device tensors, and for loads that still read this
        # host memory.
        self._storing.wait_stream(torch.cuda.current_stream(self._device))
        self._storing.wait_stream(self._loading)
        with torch.cuda.stream(self._storing):
            for device, host in pairs:
                host.copy_(device, non_blocking=True)
                if not held:
                    device.record_stream(self._storing)
        mark = self._storing.record_event()
        if self.limit is not None and not held:
            self._stored.append(mark)
        return mark

    def keep_limit(self) -> None:
        """See `Transfers.keep_limit`."""
        while self._stored and self.room() < 0:
            self._stored.popleft().synchronize()
            torch.empty(1, device=self._device)  # so that the allocator looks for ended copies

    def load(self, host: Tensor, stored: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        """See `Transfers.load`."""
        device = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        mark = self.fill([(device, host)], stored)
        self._loaded[id(mark)] = mark, device
        return device, mark

    def fill(self, pairs: Pairs, stored: torch.cuda.Event) -> torch.cuda.Event:
        """See `Transfers.fill`."""
        # The computing stream may still use this memory.
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
        most, total, used = cuda_memory(self._device)
        room = most - MARGIN * total
        if self.limit is not None:
            room = min(room, self._base + self.limit)
        if as_planned:
            room = min(room, self._base + self._expected)
        return room - used


def transfers_of(device: torch.device, limit: float | None) -> Transfers:
    """The transfers of a device; `limit`: see PrefixConfig.memory_budget."""
    return CudaTransfers(device, limit) if device.type == "cuda" else Transfers(limit)
