"""CUDA graphs: whether they can be captured here, and the calls of torch that capture one."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

SAVER = "torch_memory_saver"
"""With which slime, miles and SGLang free the memory of what is not used in a phase."""


def why_not(device: torch.device, *, collectives: bool) -> str:
    """Why graphs cannot be captured on a device; "" if they can.

    Args:
        device: of the model.
        collectives: whether what is captured sends messages to other ranks.
    """
    if device.type != "cuda":
        return "CUDA graphs need a GPU"
    if SAVER in sys.modules:
        return f"{SAVER} takes memory away between steps, with what graphs have in it"
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if collectives and expandable and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        # As in megatron/core/transformer/cuda_graphs.py: NCCL would register memory that moves.
        return "set NCCL_GRAPH_REGISTER=0: PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"
    return ""


class Graph:
    """A graph whose memory is in a pool that others use, too; see `pool`."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Captures what is launched on the current stream."""
        self.begin()
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.end()

    def begin(self) -> None:
        """Begins to capture. Other threads may go on with what a capture does not allow."""
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """Ends it."""
        self._graph.capture_end()

    def abandon(self) -> None:
        """Ends a capture that has failed. torch then leaves its allocator in the pool
        (`CUDAGraph::capture_end` in aten/src/ATen/cuda/CUDAGraph.cpp), hence the private call."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)

    def replay(self) -> None:
        """Launches what was captured."""
        self._graph.replay()


def reserved_bytes(device: torch.device) -> int:
    """Bytes that torch holds of a device, used or not; 0 of others."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def pool() -> Any:
    """A pool of memory for graphs."""
    return torch.cuda.graph_pool_handle()


def uncounted_bytes(pools: Iterable[Any]) -> int:
    """Bytes of pools that only their graphs use. For torch's allocator they are reserved, and not
    allocated: the tensors that were there while a graph was captured are gone."""
    theirs = {tuple(pool) for pool in pools}
    return sum(
        block["total_size"] - block["allocated_size"]
        for block in torch.cuda.memory_snapshot()
        if tuple(block["segment_pool_id"]) in theirs
    )


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """That of all captures on a device: what one of them has freed in a pool is free for others on
    the same stream only."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A stream for captures, which begins and ends with the current one."""
    outer, inner = torch.cuda.current_stream(), _stream(torch.cuda.current_device())
    inner.wait_stream(outer)
    with torch.cuda.stream(inner):
        yield
    outer.wait_stream(inner)


def settle() -> None:
    """Waits for all that is under way: a capture allows no waiting in it. The allocator gives back
    what it has cached: in a capture it would not, and run out of memory (as torch.cuda.graph)."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def recover() -> None:
    """After a capture that has failed: torch's generator of random numbers believes that one is
    under way until the next one ends. What was launched on that stream before, which adds zeros to
    gradients, is waited for: `apart` has not been left in order."""
    torch.cuda.synchronize()
    with apart(), Graph(pool()).captured():
        torch.zeros(1, device="cuda")
