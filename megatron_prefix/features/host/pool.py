"""Host memory for offloaded tensors, sized by the prediction for the first step.

Page-locked memory takes long to allocate (about 0.7 s a GiB on one H200 machine), so it is
allocated between steps and kept, as slabs that are divided first fit. What does not fit gets its
own buffer, and the next step gets more slabs.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ALIGNMENT = 512
"""Bytes; CUDA's own allocator aligns to as many."""
SLAB_BYTES = {True: 1 << 30, False: 1 << 20}
"""Smallest slab, page-locked or not; a power of two, since torch rounds up to one."""

SCRAPS = 1.1
"""Host memory allocated, over what is expected: tensors do not fill slabs."""


class Lease:
    """Host bytes in use; the pool gets them back when nothing refers to the lease any more.

    Attributes:
        tensor: uint8 [num_bytes].
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass
class _Slab:
    """One allocation and its unused parts, [start, end) in order."""

    memory: Tensor
    holes: list[tuple[int, int]]

    def take(self, size: int) -> int | None:
        """Takes from the first hole that is long enough; returns its start."""
        for place, (start, end) in enumerate(self.holes):
            if end - start >= size:
                self.holes[place : place + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Takes a part back and joins it with neighbouring holes."""
        joined: list[tuple[int, int]] = []
        for hole in sorted([*self.holes, (start, start + size)]):
            if joined and joined[-1][1] == hole[0]:
                hole = (joined.pop()[0], hole[1])
            joined.append(hole)
        self.holes = joined


class StagingPool:
    """Host memory for one device's offloaded tensors.

    Args:
        pinned: page-lock it, as asynchronous copies need (CUDA).

    Attributes:
        outside_bytes: the most bytes outside of slabs in this step.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: list[_Slab] = []
        self._used = self._outside = self._largest = 0
        self.outside_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        """Leased now, in slabs and outside of them."""
        return self._used

    def begin_step(self, expected: float = 0.0) -> None:
        """Allocates slabs: in the first step for the expected bytes, later for those that were
        outside of slabs in the last step."""
        missing = self.outside_bytes
        self.outside_bytes = self._outside
        if missing:
            logger.info(
                "offload: %.1f MiB did not fit in the host memory pool of %.1f MiB and were"
                " allocated tensor by tensor; the pool grows",
                missing / 2**20, self.num_bytes / 2**20,
            )  # fmt: skip
        elif expected and not self._slabs:
            missing = int(SCRAPS * expected)
            logger.info(
                "offload: allocating %.1f GiB of host memory, which later steps use again",
                missing / 2**30,
            )
        if not missing:
            return
        size = max(SLAB_BYTES[self._pinned], 1 << (self._largest - 1).bit_length())
        for _ in range(-(-missing // size)):
            self._slabs.append(_Slab(self._empty(size), [(0, size)]))

    def take(self, num_bytes: int) -> Lease:
        """Leases host bytes."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._used += size
        self._largest = max(self._largest, size)
        for slab in self._slabs:
            start = slab.take(size)
            if start is not None:
                lease = Lease(slab.memory[start : start + num_bytes])
                weakref.finalize(lease, self._give, slab, start, size)
                return lease
        self._outside += size
        self.outside_bytes = max(self.outside_bytes, self._outside)
        lease = Lease(self._empty(num_bytes))
        weakref.finalize(lease, self._give, None, 0, size)
        return lease

    def _give(self, slab: _Slab | None, start: int, size: int) -> None:
        self._used -= size
        if slab is None:
            self._outside -= size
        else:
            slab.give(start, size)

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
