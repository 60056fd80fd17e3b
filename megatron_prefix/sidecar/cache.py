"""The sidecar: K/V of inner segments and the gradients that their descendants send back.

K and V are the forward cache, gK and gV the backward cache ("Schedule-Level Shared-Prefix Reuse for
LLM RL Training", sections 3.3 and 4.1). It belongs to a step, not to the model, so it is in no
checkpoint. Every change of state is checked: a read before the capture, a second consumption or a
capture after release is an error instead of wrong gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_prefix.sidecar.chain import Chain
from megatron_prefix.tree import Segment
from megatron_prefix.tree.kv_layout import PIECE_KEYS, Block, BufferMap, buffer_map

if TYPE_CHECKING:
    from megatron_prefix.sidecar.host_chains import HostLayers


class SegmentState(Enum):
    """Life of one inner segment in one layer."""

    EMPTY = "empty"
    CAPTURED = "captured"
    CONSUMED = "consumed"
    FREED = "freed"


class SidecarCache:
    """K/V and gK/gV of one model chunk for one step.

    Args:
        segments: the step's segments.
        num_layers: attention layers of the model chunk.
        parts: context-parallel ranks, which hold equal parts of every segment; this cache holds one
            rank's part.
        host: layers whose chains are on the host, and on the device only while they are used.

    Attributes:
        peak_bytes: the most device memory that K/V and gK/gV have taken.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        num_layers: int,
        parts: int = 1,
        host: HostLayers | None = None,
    ) -> None:
        self.map: BufferMap = buffer_map(segments, parts)
        self.parts = parts
        self._lengths = [segment.padded_length // parts for segment in segments]
        self._inner = [segment.inner for segment in segments]
        self._num_layers, self._host = num_layers, host
        self._chains: dict[tuple[int, int], Chain] = {}
        self._states: dict[tuple[int, int], SegmentState] = {}
        self._held = self.peak_bytes = 0

    def state(self, layer: int, index: int) -> SegmentState:
        """State of segment `index` in `layer`."""
        return self._states.get((layer, index), SegmentState.EMPTY)

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device now."""
        return self._held

    def capture(self, layer: int, index: int, key: Tensor, value: Tensor) -> None:
        """Copies a segment's K [positions, kv_heads, dim] and V [positions, kv_heads, value_dim]
        into its chain.

        They are copied because Megatron frees the storage of K and V under some recompute and
        offload options. A second call comes from activation recomputation and changes nothing.
        """
        if self.state(layer, index) is SegmentState.CAPTURED:
            return
        self._expect(layer, index, SegmentState.EMPTY)
        head, span = self.map.head[index], self._span(index)
        chain = self._chains.get((layer, head))
        if chain is None:
            made = self._host.chain if self._host is not None and layer in self._host else Chain
            chain = made(self.map.length[head], key, value, self._count)
            self._chains[layer, head] = chain
        chain.write(span, key, value)
        chain.num_open = span.stop
        self._states[layer, index] = SegmentState.CAPTURED

    def own(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        """K and V of the segment itself, views."""
        self._expect(layer, index, SegmentState.CAPTURED)
        span = self._span(index)
        key, value = self._chains[layer, self.map.head[index]].read(span.stop)
        return key[span], value[span]

    def prefetch(self, layer: int, index: int, *, backward: bool = False) -> None:
        """Announces that a segment's attention will run in a layer.

        Args:
            layer: local index; it may be out of range.
            index: the segment.
            backward: whether gK/gV are needed, too; layers then run from the last to the first.
        """
        if self._host is None or (near := self._host.near(layer, backward)) is None:
            return
        wanted = {block.head: (block.stop, block.stop) for block in self.map.blocks[index]}
        if self._inner[index]:
            span, there = self._span(index), self.state(near, index) is SegmentState.CAPTURED
            wanted[self.map.head[index]] = (span.stop if there else span.start, span.stop)
        for head, (loaded, length) in wanted.items():
            if (near, head) in self._chains:
                self._chains[near, head].fetch(loaded, length, gradients=backward)

    def release(self, layer: int) -> None:
        """Tells that a segment is done in a layer."""
        if self._host is not None and layer in self._host:
            for (number, _), chain in self._chains.items():
                if number == layer:
                    chain.leave()

    def read(self, layer: int, block: Block) -> tuple[Tensor, Tensor]:
        """K and V of a dense block, views."""
        return self._open(layer, block).read(block.stop)

    def pieces(self, block: Block) -> list[slice]:
        """The pieces of a block for which attention is computed one by one, in order.

        In one piece a long block would need memory for all its gradients beside their sums, and a
        new kernel plan for every length of a growing chain.
        """
        return [
            slice(start, min(start + PIECE_KEYS, block.stop))
            for start in range(0, block.stop, PIECE_KEYS)
        ]

    def add_gradient(
        self, layer: int, block: Block, key_grad: Tensor, value_grad: Tensor, start: int = 0
    ) -> None:
        """Adds a wave's gK, gV of a dense block, or of its piece from position `start` on, in fp32
        or wider."""
        self._open(layer, block).add(block.stop, start, key_grad, value_grad)

    def take_gradient(self, layer: int, index: int) -> tuple[Tensor, Tensor] | None:
        """The accumulated gK, gV of a segment; only once. None where nothing was sent."""
        self._expect(layer, index, SegmentState.CAPTURED)
        self._states[layer, index] = SegmentState.CONSUMED
        chain, span = self._chains[layer, self.map.head[index]], self._span(index)
        chain.num_open = span.start
        return chain.sent(span)

    def free(self, index: int, *, consumed: bool) -> None:
        """Releases a segment after its backward; its chain is freed with the chain's first segment.

        Args:
            index: the segment.
            consumed: whether every layer must have taken the gradients (False for forward_only).
        """
        for layer in range(self._num_layers):
            self._expect(layer, index, SegmentState.CONSUMED if consumed else SegmentState.CAPTURED)
            self._states[layer, index] = SegmentState.FREED
            self._chains[layer, self.map.head[index]].num_open = self.map.offset[index]
            if self.map.head[index] == index:
                self._chains.pop((layer, index)).drop()

    def clear(self) -> None:
        """Drops everything in any state: at the end of a step, also of a failed one."""
        for chain in self._chains.values():
            chain.drop()
        if self._host is not None:
            self._host.clear()
        self._chains.clear()
        self._states.clear()

    def _count(self, num_bytes: int) -> None:
        self._held += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._held)

    def _open(self, layer: int, block: Block) -> Chain:
        chain = self._chains.get((layer, block.head))
        num_open = 0 if chain is None else chain.num_open
        if chain is None or block.stop > num_open:
            raise RuntimeError(
                f"layer {layer}: positions up to {block.stop} of the chain of segment {block.head}"
                f" are read, {num_open} are there: before their forward or after their backward"
            )
        return chain

    def _span(self, index: int) -> slice:
        return slice(self.map.offset[index], self.map.offset[index] + self._lengths[index])

    def _expect(self, layer: int, index: int, wanted: SegmentState) -> None:
        found = self.state(layer, index)
        if found is not wanted:
            raise RuntimeError(
                f"layer {layer}, segment {index}: {found.value}, expected {wanted.value}"
            )
