"""How much memory a device has left."""

from __future__ import annotations

import os

import torch

MARGIN = 0.05
"""Share of a device's memory that is left for fragmentation and other libraries."""


def free_bytes(device: torch.device, limit: float | None = None) -> float:
    """Bytes that a step may still allocate, without the margin; the host does not wait.

    Args:
        limit: bytes that a step may use; None: what is free.
    """
    if device.type != "cuda":
        return free_host_bytes() * (1 - MARGIN) if limit is None else limit
    free, total, used = cuda_memory(device)
    room = free - used - MARGIN * total
    return room if limit is None else min(room, limit)


def cuda_memory(device: torch.device) -> tuple[float, float, float]:
    """Bytes that the process can have, the size of the device, and bytes in use.

    The process can have what the driver reports as free and what the allocator has reserved. Memory
    that waits for a copy on a side stream counts as used (`active`).
    """
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    used = stats.get("active_bytes.all.current", 0)
    return free + stats.get("reserved_bytes.all.current", 0), total, used


def free_host_bytes() -> float:
    """Bytes of the machine's memory that nobody uses."""
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def may_count() -> bool:
    """Whether any device of this machine has an allocator that counts."""
    return torch.cuda.is_available()


def counts_bytes(device: torch.device) -> bool:
    """Whether the allocator of a device counts."""
    return device.type == "cuda"
