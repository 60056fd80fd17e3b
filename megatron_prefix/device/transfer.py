"""Numbers from the host to the device and back, through page-locked memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(device: torch.device, index: np.ndarray) -> Tensor:
    """Indices on the device; the host does not wait."""
    host_index = torch.from_numpy(index)
    if device.type != "cuda":
        return host_index
    host = torch.empty_like(host_index, pin_memory=True)
    # By numpy: torch wakes threads to copy a megabyte, which takes milliseconds.
    host.numpy()[...] = index
    return host.to(device, non_blocking=True)


def to_host(numbers: Tensor) -> np.ndarray:
    """Numbers of the device as an array; the host waits. To pageable memory 5 MB took 2.6 ms
    (benchmarks/LOG.md)."""
    if numbers.device.type != "cuda":
        array: np.ndarray = numbers.cpu().numpy()
        return array
    host = torch.empty_like(numbers, device="cpu", pin_memory=True)
    return host.copy_(numbers).numpy()
