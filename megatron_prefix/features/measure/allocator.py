"""What a device's allocator has counted."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Peaks(NamedTuple):
    """Bytes of a device's allocator: `used` now; `allocated` and `reserved` at most so far."""

    used: float
    allocated: float
    reserved: float


def peaks(device: torch.device) -> Peaks:
    """What the allocator says; the host does not wait. Counters are never reset: trainers log
    them."""
    stats = torch.cuda.memory_stats(device)
    names = "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak"
    return Peaks(*(float(stats.get(name, 0)) for name in names))
