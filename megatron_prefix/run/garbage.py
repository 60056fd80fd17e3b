"""Python's collector of reference cycles, kept from running while the device waits for a plan."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No automatic collection meanwhile; it is on again afterwards if it was before.

    Reading and planning a step of some 270 rollouts makes enough objects for 8 to 18 collections,
    2 to 6 ms, and every now and then for one of everything that the trainer has: 0.2 to 0.4 s where
    torch and Megatron-Core are all there is (2 CPU cores; benchmarks/LOG.md, 2026-11-26). Behind
    the first action the host is ahead of the device, and a collection costs less.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
