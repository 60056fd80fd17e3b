"""How fast this machine computes and copies, measured once."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from megatron_prefix.plan.memory_policy import Rates

WITHOUT_DEVICE = Rates(flops=1e11, link=1e10)
"""Without a GPU there is no link; these only have to give some choice."""
EFFICIENCY = 0.75
"""Rate of a layer over that of a large matrix product."""
_WIDTH, _BYTES, _TIMES = 4096, 1 << 27, 8


@functools.cache
def measured(device: torch.device, dtype: torch.dtype) -> Rates:
    """Rates of a device; the first call on it takes tens of milliseconds and waits for it.

    Args:
        device: of the model.
        dtype: of its matrix products.
    """
    if device.type != "cuda":
        return WITHOUT_DEVICE
    matrix = torch.ones((_WIDTH, _WIDTH), dtype=dtype, device=device)
    product = _seconds(device, lambda: matrix @ matrix)
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    stored = _seconds(device, lambda: host.copy_(there, non_blocking=True))
    loaded = _seconds(device, lambda: there.copy_(host, non_blocking=True))
    return Rates(EFFICIENCY * 2 * _WIDTH**3 / product, _BYTES / max(stored, loaded))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Mean seconds of a call, after one that is not timed."""
    work()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(_TIMES):
        work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / _TIMES
