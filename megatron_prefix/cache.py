"""The sidecar: K/V of inner segments and the gradients that their descendants send back.

"Schedule-Level Shared-Prefix Reuse for LLM RL Training", sections 3.3 and 4.1: K and V are the
forward cache, gK and gV the backward cache.  It belongs to a step, never to the model, so it is in
no checkpoint.  Every transition is checked: a read before the capture, a second consumption or a
capture after release raises instead of training on wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megatron_prefix.attention.blocks import PIECE_ROWS, Block, BufferMap, buffer_map
from megatron_prefix.tree import Segment


class State(Enum):
    """Life of one inner segment in one layer."""

    EMPTY = "empty"
    CAPTURED = "captured"
    CONSUMED = "consumed"
    FREED = "freed"


@dataclass
class _Buffer:
    """One chain in one layer: K, V [rows, kv_heads, dim], and gK, gV in fp32 or wider."""

    key: Tensor
    value: Tensor
    key_grad: Tensor | None = None
    value_grad: Tensor | None = None
    num_open: int = 0  # the first rows, captured and not consumed: what may be read


class SidecarCache:
    """K/V and gK/gV of one model chunk for one step.

    Args:
        segments: the step's segments.
        num_layers: attention layers of the model chunk.
        parts: ranks that share every segment's rows equally; this cache holds one rank's.

    Attributes:
        peak_bytes: the most that K/V and gK/gV have taken at once.
    """

    def __init__(self, segments: Sequence[Segment], num_layers: int, parts: int = 1) -> None:
        self.map: BufferMap = buffer_map(segments, parts)
        self.parts = parts
        self._rows = [segment.num_rows // parts for segment in segments]
        self._num_layers = num_layers
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        self._states: dict[tuple[int, int], State] = {}
        self._held = self.peak_bytes = 0

    def state(self, layer: int, index: int) -> State:
        """Where segment `index` stands in `layer`."""
        return self._states.get((layer, index), State.EMPTY)

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._held

    def capture(self, layer: int, index: int, key: Tensor, value: Tensor) -> None:
        """Copies a segment's K [rows, kv_heads, dim] and V [rows, kv_heads, value_dim] into its
        chain.

        Copies, since Megatron frees the storage of K and V under some recompute and offload
        options. A second call is activation recompute running the forward again: the first copy
        stays.
        """
        if self.state(layer, index) is State.CAPTURED:
            return
        self._expect(layer, index, State.EMPTY)
        head = self.map.head[index]
        buffer = self._buffers.get((layer, head))
        if buffer is None:
            rows = self.map.length[head]
            buffer = _Buffer(
                key.new_empty((rows, *key.shape[1:])), value.new_empty((rows, *value.shape[1:]))
            )
            self._buffers[layer, head] = buffer
            self._take_bytes(buffer.key, buffer.value)
        span = self._span(index)
        buffer.key[span].copy_(key)
        buffer.value[span].copy_(value)
        buffer.num_open = span.stop
        self._states[layer, index] = State.CAPTURED

    def own(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        """K and V of the segment itself, views of the chain's buffer."""
        self._expect(layer, index, State.CAPTURED)
        buffer, span = self._buffers[layer, self.map.head[index]], self._span(index)
        return buffer.key[span], buffer.value[span]

    def prefetch(self, layer: int, blocks: Sequence[Block]) -> None:
        """Announces reads; here everything is at hand already."""

    def release(self, layer: int) -> None:
        """Ends the reads of a layer; here nothing was made for them."""

    def read(self, layer: int, block: Block) -> tuple[Tensor, Tensor]:
        """K and V of a dense block, views of the chain's buffer."""
        buffer = self._open(layer, block)
        return buffer.key[: block.stop], buffer.value[: block.stop]

    def pieces(self, block: Block) -> list[slice]:
        """Rows of `read` by which attention to a block is computed, in order.

        A long block in one piece would take memory for all its gradients beside where they are
        summed up, and a kernel's plan for every length of a growing chain.
        """
        return [
            slice(start, min(start + PIECE_ROWS, block.stop))
            for start in range(0, block.stop, PIECE_ROWS)
        ]

    def add_gradient(
        self, layer: int, block: Block, key_grad: Tensor, value_grad: Tensor, start: int = 0
    ) -> None:
        """Adds a wave's gK, gV of a dense block, or of a piece from row `start` on, in fp32 or
        wider."""
        buffer = self._open(layer, block)
        is_first = buffer.key_grad is None
        buffer.key_grad = _accumulated(buffer.key_grad, key_grad, start, buffer.key)
        buffer.value_grad = _accumulated(buffer.value_grad, value_grad, start, buffer.value)
        if is_first:
            self._take_bytes(buffer.key_grad, buffer.value_grad)

    def take_gradient(self, layer: int, index: int) -> tuple[Tensor, Tensor] | None:
        """The accumulated gK, gV of a segment, once; None when nothing was sent."""
        self._expect(layer, index, State.CAPTURED)
        self._states[layer, index] = State.CONSUMED
        buffer, span = self._buffers[layer, self.map.head[index]], self._span(index)
        buffer.num_open = span.start
        if buffer.key_grad is None or buffer.value_grad is None:
            return None
        return buffer.key_grad[span], buffer.value_grad[span]

    def free(self, index: int, *, consumed: bool) -> None:
        """Releases a segment after its backward; the chain's memory goes with the chain's head.

        Args:
            index: the segment.
            consumed: whether every layer must have taken the gradients (False for forward_only).
        """
        for layer in range(self._num_layers):
            self._expect(layer, index, State.CONSUMED if consumed else State.CAPTURED)
            self._states[layer, index] = State.FREED
            self._buffers[layer, self.map.head[index]].num_open = self.map.offset[index]
            if self.map.head[index] == index:
                buffer = self._buffers.pop((layer, index))
                gone = (buffer.key, buffer.value, buffer.key_grad, buffer.value_grad)
                self._held -= sum(tensor.nbytes for tensor in gone if tensor is not None)

    def clear(self) -> None:
        """Drops everything, whatever its state: the end of a step or of a failed one."""
        self._buffers.clear()
        self._states.clear()
        self._held = 0

    def _take_bytes(self, *tensors: Tensor) -> None:
        self._held += sum(tensor.nbytes for tensor in tensors)
        self.peak_bytes = max(self.peak_bytes, self._held)

    def _open(self, layer: int, block: Block) -> _Buffer:
        buffer = self._buffers.get((layer, block.head))
        num_open = 0 if buffer is None else buffer.num_open
        if buffer is None or block.stop > num_open:
            raise RuntimeError(
                f"layer {layer}: rows up to {block.stop} of the chain of segment {block.head} asked"
                f" for, {num_open} there: before their forward or after their backward"
            )
        return buffer

    def _span(self, index: int) -> slice:
        return slice(self.map.offset[index], self.map.offset[index] + self._rows[index])

    def _expect(self, layer: int, index: int, wanted: State) -> None:
        found = self.state(layer, index)
        if found is not wanted:
            raise RuntimeError(
                f"layer {layer}, segment {index}: {found.value}, expected {wanted.value}"
            )


def _accumulated(total: Tensor | None, part: Tensor, start: int, like: Tensor) -> Tensor:
    if total is None:
        dtype = torch.promote_types(like.dtype, torch.float32)
        if part.shape == like.shape:
            return part.to(dtype, copy=True)
        total = torch.zeros_like(like, dtype=dtype)
    total[start : start + len(part)].add_(part)
    return total
