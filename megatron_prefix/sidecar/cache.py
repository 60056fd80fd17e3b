"""The sidecar: payloads of inner segments and the gradients that their descendants send back.

A payload is what a layer leaves for the children of a span: K and V of its positions
("Schedule-Level Shared-Prefix Reuse for LLM RL Training", sections 3.3 and 4.1: the forward and the
backward cache), or the state behind its last position and the last inputs of a convolution, its
tail ("Gated Delta Networks"; "Transformers are SSMs"). Gradients are summed in fp32 or wider.

The sidecar belongs to a step, not to the model, so it is in no checkpoint. Every change of state is
checked: a read before the capture, a second consumption or a capture after release is an error
instead of wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import on
from megatron_prefix.sidecar.arena import Arena, Both, Payload, Rows
from megatron_prefix.tree.payload_map import Form, PayloadMap, one_interval

if TYPE_CHECKING:
    from megatron_prefix.sidecar.host_arena import HostLayers


class SegmentState(Enum):
    """Life of one inner segment in one layer."""

    EMPTY = "empty"
    CAPTURED = "captured"
    CONSUMED = "consumed"
    FREED = "freed"


@dataclass(frozen=True, eq=False)
class Reading:
    """What a segment reads in one go.

    Attributes:
        rows: of the arena, on this rank.
    """

    rows: Rows


@dataclass(frozen=True, eq=False)
class LevelReading(Reading):
    """What a segment sees in one level (megatron_prefix/tree/payload_map.py); rows run after run.

    Attributes:
        number: of the level.
        query_lengths: queries of every run, on this rank.
        key_lengths: keys of every run, of all ranks.
        queries: the queries among the segment's positions on this rank.
    """

    number: int
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    queries: Rows


class OwnKeys:
    """A segment's own K and V in one call of attention, and their gradients.

    Args:
        both: K and V, [positions, kv_heads, dim] each.
        sent: takes what the segment's descendants have sent; None if it has none.
    """

    def __init__(self, both: Both, sent: Callable[[], Both | None] | None = None) -> None:
        self._both, self._sent = both, sent

    def runs(self) -> Both:
        """K and V of this rank's own runs (`cp_layout.own_runs`), run after run."""
        return self._both

    def send(self, gradients: Both) -> None:
        """Gives the gradients of `runs` to the keys and values."""
        self._both = gradients

    def take(self) -> Both:
        """The gradients of this rank's K and V, those of descendants included; after `send`."""
        mine, sent = self._both, self._sent() if self._sent is not None else None
        return mine if sent is None else (sent[0] + mine[0], sent[1] + mine[1])


class SidecarCache:
    """Payloads and their gradients of one model chunk for one step.

    Args:
        planned: where they lie; of this rank's part of every segment.
        forms: of the payloads of the layers that leave one, in the order in which they run.
        host: layers whose arena is on the host, and on the device only while it is used.

    Attributes:
        map, forms: as given.
        peak_bytes: the most device memory that all of it has taken.
    """

    def __init__(
        self, planned: PayloadMap, forms: Sequence[Form], host: HostLayers | None = None
    ) -> None:
        self.map, self.forms, self._host = planned, tuple(forms), host
        self._arenas: dict[int, Arena] = {}
        self._states: dict[tuple[int, int], SegmentState] = {}
        self._live: list[set[int]] = [set() for _ in forms]
        self._levels: dict[tuple[int, int], LevelReading] = {}
        self._held = self.peak_bytes = 0

    def state(self, layer: int, index: int) -> SegmentState:
        """State of segment `index` in `layer`."""
        return self._states.get((layer, index), SegmentState.EMPTY)

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device now."""
        return self._held

    def capture(self, layer: int, index: int, payload: Payload) -> None:
        """Copies a segment's payload into its layer's arena.

        It is copied because Megatron frees the storage of K and V under some recompute and offload
        options. A second call comes from activation recomputation and changes nothing.
        """
        if self.state(layer, index) is SegmentState.CAPTURED:
            return
        self._expect(layer, index, SegmentState.EMPTY)
        if layer not in self._arenas:
            on_host = self._host is not None and layer in self._host
            made = self._host.arena if on_host else Arena  # type: ignore[union-attr]
            self._arenas[layer] = made(self.map.rows(self.forms[layer]), payload, self._count)
        self._arenas[layer].write(index, payload)
        self._live[layer].add(index)
        self._states[layer, index] = SegmentState.CAPTURED

    def own(self, layer: int, index: int) -> Payload:
        """The payload of the segment itself, views."""
        self._expect(layer, index, SegmentState.CAPTURED)
        rows = self.map.rows(self.forms[layer]).intervals[index]
        if rows is None:
            raise RuntimeError(f"segment {index} is a wave: it leaves nothing here")
        return self._arenas[layer].read((index,), rows)

    def own_keys(self, layer: int, index: int, inner: bool, both: Both) -> OwnKeys:
        """A segment's own K and V for one call of its attention, captured if it is inner.

        Args:
            layer: local index.
            index: the segment.
            inner: whether others read it; what is captured is then used, not `both`.
            both: this rank's K and V, [positions, kv_heads, dim] each.
        """
        if not inner:
            return OwnKeys(both)
        self.capture(layer, index, both)
        key, value = self.own(layer, index)
        return OwnKeys((key, value), lambda: pair(self.take(layer, index)))

    def level(self, index: int, number: int) -> LevelReading:
        """A segment's level as a kernel's call needs it; made once a step."""
        known = self._levels.get((index, number))
        if known is None:
            level, parts = self.map.levels[index][number], self.map.shares
            if not self._arenas:  # they know the device
                self._open(0, index, self.map.positions.seen[index])
            device = next(iter(self._arenas.values())).device
            queries = _rows(device, [(run.first, run.stop) for run in level.runs])
            keys = _rows(device, [(run.start, run.end) for run in level.runs])
            seen = tuple(num * parts for num in level.keys)
            known = LevelReading(keys, number, level.queries, seen, queries)
            self._levels[index, number] = known
        return known

    def read(self, layer: int, index: int, what: Reading) -> Payload:
        """What a segment reads of others: views, or copies if its rows are not one interval."""
        seen = self._seen(layer, index)
        return self._open(layer, index, seen).read(seen, what.rows)

    def add(self, layer: int, index: int, what: Reading, gradients: Payload) -> None:
        """Adds what a segment sends to rows, all different; the sums are fp32 or wider."""
        seen = self._seen(layer, index)
        self._open(layer, index, seen).add(seen, what.rows, gradients)

    def take(self, layer: int, index: int) -> Payload | None:
        """What a segment's descendants have sent; only once. None if nothing was sent."""
        self._expect(layer, index, SegmentState.CAPTURED)
        self._states[layer, index] = SegmentState.CONSUMED
        self._live[layer].discard(index)
        return self._arenas[layer].sent(index)

    def prefetch(self, layer: int, index: int, *, backward: bool = False) -> None:
        """Announces that a segment will run in a layer.

        Args:
            layer: local index; it may be out of range.
            index: the segment.
            backward: whether gradients are needed, too; layers then run from the last to the first.
        """
        if self._host is None or (near := self._host.near(layer, backward)) is None:
            return
        if near not in self._arenas:
            return
        seen = self._seen(near, index)
        own = (index,) if self.state(near, index) is SegmentState.CAPTURED else ()
        if self.forms[near] is Form.POSITIONS:
            wanted = (*seen, *own)
            self._arenas[near].fetch(wanted, wanted if backward else ())
        elif backward:  # autograd has the states; a forward that runs again reads them by itself
            self._arenas[near].fetch((), (*seen, *own))
        else:
            self._arenas[near].fetch(seen)

    def release(self, layer: int) -> None:
        """Tells that a segment is done in a layer."""
        if self._host is not None and layer in self._host and layer in self._arenas:
            self._arenas[layer].leave()

    def free(self, index: int, *, consumed: bool) -> None:
        """Releases a segment after its backward; an arena is freed with the last one in it.

        Args:
            index: the segment.
            consumed: whether every layer must have taken the gradients (False for forward_only).
        """
        for layer, live in enumerate(self._live):
            self._expect(layer, index, SegmentState.CONSUMED if consumed else SegmentState.CAPTURED)
            self._states[layer, index] = SegmentState.FREED
            live.discard(index)
            if not live and layer in self._arenas:
                self._arenas.pop(layer).drop()

    def clear(self) -> None:
        """Drops everything in any state: at the end of a step, also of a failed one."""
        for arena in self._arenas.values():
            arena.drop()
        for live in self._live:
            live.clear()
        self._arenas.clear()
        self._states.clear()
        self._levels.clear()
        if self._host is not None:
            self._host.clear()

    def _seen(self, layer: int, index: int) -> tuple[int, ...]:
        return self.map.rows(self.forms[layer]).seen[index]

    def _count(self, num_bytes: int) -> None:
        self._held += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._held)

    def _open(self, layer: int, index: int, wanted: Sequence[int]) -> Arena:
        """The arena in which these segments are captured and not consumed."""
        closed = [seen for seen in wanted if seen not in self._live[layer]]
        if closed:
            raise RuntimeError(
                f"layer {layer}: segment {index} reads segment {closed[0]}, which is"
                f" {self.state(layer, closed[0]).value}: before its forward or after its backward"
            )
        return self._arenas[layer]

    def _expect(self, layer: int, index: int, wanted: SegmentState) -> None:
        state = self.state(layer, index)
        if state is not wanted:
            raise RuntimeError(
                f"layer {layer}, segment {index}: {state.value}, expected {wanted.value}"
            )


def pair(payload: Payload | None) -> Both | None:
    """K and V of a payload of attention."""
    return None if payload is None else (payload[0], payload[1])


def _rows(device: torch.device, intervals: Sequence[tuple[int, int]]) -> Rows:
    """Intervals one after another: one interval if they are neighbours, else an index."""
    whole = one_interval(intervals)
    if whole is not None:
        return whole
    index: Tensor = on(device, np.concatenate([np.arange(*interval) for interval in intervals]))
    return index
