"""The sidecar: K/V of inner segments and the gradients that their descendants send back.

K and V are the forward cache, gK and gV the backward cache ("Schedule-Level Shared-Prefix Reuse for
LLM RL Training", sections 3.3 and 4.1). It belongs to a step, not to the model, so it is in no
checkpoint. Every change of state is checked: a read before the capture, a second consumption or a
capture after release is an error instead of wrong gradients.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.sidecar.arena import Arena, Both
from megatron_prefix.tree.kv_layout import ArenaMap, Level

if TYPE_CHECKING:
    from megatron_prefix.sidecar.host_arena import HostLayers


class SegmentState(Enum):
    """Life of one inner segment in one layer."""

    EMPTY = "empty"
    CAPTURED = "captured"
    CONSUMED = "consumed"
    FREED = "freed"


class SidecarCache:
    """K/V and gK/gV of one model chunk for one step.

    Args:
        planned: where they lie; of this rank's part of every segment.
        num_layers: attention layers of the model chunk.
        parts: context-parallel ranks, which hold equal parts of every segment.
        host: layers whose arena is on the host, and on the device only while it is used.

    Attributes:
        map: `planned`.
        peak_bytes: the most device memory that K/V and gK/gV have taken.
    """

    def __init__(
        self,
        planned: ArenaMap,
        num_layers: int,
        parts: int = 1,
        host: HostLayers | None = None,
    ) -> None:
        self.map, self.parts = planned, parts
        self._num_layers, self._host = num_layers, host
        self._arenas: dict[int, Arena] = {}
        self._states: dict[tuple[int, int], SegmentState] = {}
        self._live: list[set[int]] = [set() for _ in range(num_layers)]
        self._rows: dict[tuple[int, int], slice | Tensor] = {}
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
        into its layer's arena.

        They are copied because Megatron frees the storage of K and V under some recompute and
        offload options. A second call comes from activation recomputation and changes nothing.
        """
        if self.state(layer, index) is SegmentState.CAPTURED:
            return
        self._expect(layer, index, SegmentState.EMPTY)
        if layer not in self._arenas:
            made = self._host.arena if self._host is not None and layer in self._host else Arena
            self._arenas[layer] = made(
                self.map.intervals, self.map.length, key, value, self._count
            )
        self._arenas[layer].write(index, key, value)
        self._live[layer].add(index)
        self._states[layer, index] = SegmentState.CAPTURED

    def own(self, layer: int, index: int) -> Both:
        """K and V of the segment itself, views."""
        self._expect(layer, index, SegmentState.CAPTURED)
        rows = self.map.intervals[index]
        if rows is None:
            raise RuntimeError(f"segment {index} is a wave: it has no K/V here")
        return self._arenas[layer].read((index,), rows)

    def prefetch(self, layer: int, index: int, *, backward: bool = False) -> None:
        """Announces that a segment's attention will run in a layer.

        Args:
            layer: local index; it may be out of range.
            index: the segment.
            backward: whether gK/gV are needed, too; layers then run from the last to the first.
        """
        if self._host is None or (near := self._host.near(layer, backward)) is None:
            return
        if near in self._arenas:
            there = self.state(near, index) is SegmentState.CAPTURED
            wanted = (*self.map.seen[index], index) if there else self.map.seen[index]
            if wanted:
                self._arenas[near].fetch(wanted, gradients=backward)

    def release(self, layer: int) -> None:
        """Tells that a segment is done in a layer."""
        if self._host is not None and layer in self._host and layer in self._arenas:
            self._arenas[layer].leave()

    def read(self, layer: int, index: int, number: int) -> Both:
        """K and V of a segment's level, run after run: views, or copies where its runs' rows are
        not one interval."""
        return self._open(layer, index).read(self.map.seen[index], self._level_rows(index, number))

    def add_gradient(
        self, layer: int, index: int, number: int, key_grad: Tensor, value_grad: Tensor
    ) -> None:
        """Adds what a segment sends to the keys of a level (shapes of `read`), in fp32 or wider."""
        self._open(layer, index).add(
            self.map.seen[index], self._level_rows(index, number), (key_grad, value_grad)
        )

    def take_gradient(self, layer: int, index: int) -> Both | None:
        """The accumulated gK, gV of a segment; only once. None where nothing was sent."""
        self._expect(layer, index, SegmentState.CAPTURED)
        self._states[layer, index] = SegmentState.CONSUMED
        self._live[layer].discard(index)
        return self._arenas[layer].sent(index)

    def free(self, index: int, *, consumed: bool) -> None:
        """Releases a segment after its backward; an arena is freed with the last one in it.

        Args:
            index: the segment.
            consumed: whether every layer must have taken the gradients (False for forward_only).
        """
        for layer in range(self._num_layers):
            self._expect(layer, index, SegmentState.CONSUMED if consumed else SegmentState.CAPTURED)
            self._states[layer, index] = SegmentState.FREED
            self._live[layer].discard(index)
            if not self._live[layer]:
                self._arenas.pop(layer).drop()

    def clear(self) -> None:
        """Drops everything in any state: at the end of a step, also of a failed one."""
        for arena in self._arenas.values():
            arena.drop()
        if self._host is not None:
            self._host.clear()
        for held in (self._arenas, self._states, self._rows, *self._live):
            held.clear()

    def _count(self, num_bytes: int) -> None:
        self._held += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._held)

    def _open(self, layer: int, index: int) -> Arena:
        """The arena in which all that a segment sees is captured and not consumed."""
        closed = [seen for seen in self.map.seen[index] if seen not in self._live[layer]]
        if closed:
            raise RuntimeError(
                f"layer {layer}: segment {index} reads segment {closed[0]}, which is"
                f" {self.state(layer, closed[0]).value}: before its forward or after its backward"
            )
        return self._arenas[layer]

    def _level_rows(self, index: int, number: int) -> slice | Tensor:
        """Rows of a level's keys; an index is made once a step."""
        if (index, number) not in self._rows:
            level = self.map.levels[index][number]
            rows: slice | Tensor | None = level.rows
            self._rows[index, number] = self._on_device(key_rows(level)) if rows is None else rows
        return self._rows[index, number]

    def _on_device(self, index: np.ndarray) -> Tensor:
        """An index on the device; the host does not wait."""
        arena = next(iter(self._arenas.values()))
        return on(arena.device, index)

    def _expect(self, layer: int, index: int, wanted: SegmentState) -> None:
        found = self.state(layer, index)
        if found is not wanted:
            raise RuntimeError(
                f"layer {layer}, segment {index}: {found.value}, expected {wanted.value}"
            )


def key_rows(level: Level) -> np.ndarray:
    """The arena's rows that a level's keys are, run after run, int64 [keys]."""
    return np.concatenate([np.arange(run.start, run.end) for run in level.runs])


def query_rows(level: Level, num_queries: int) -> np.ndarray | None:
    """The queries of a level's runs, int64; None where they are all `num_queries`."""
    if sum(level.queries) == num_queries:
        return None
    return np.concatenate([np.arange(run.first, run.stop) for run in level.runs])


def on(device: torch.device, index: np.ndarray) -> Tensor:
    """Indices on the device; the host does not wait."""
    host = torch.from_numpy(index)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
