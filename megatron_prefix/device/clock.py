"""Times of a device: those of its computing stream on a GPU, else of the host."""

from __future__ import annotations

import time
from typing import Any

import torch


def wait_for(device: torch.device) -> None:
    """The host waits until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> Any:
    """A moment: an event in the current stream, which nobody waits for, or the host's seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(begin: Any, end: Any) -> float:
    """Seconds from one moment to another. Events must have happened."""
    if isinstance(end, float):
        return end - float(begin)
    return float(begin.elapsed_time(end)) / 1e3
