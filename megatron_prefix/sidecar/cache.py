"""The sidecar: payloads of inner segments and the gradients that their descendants send back.

A payload is what a layer keeps of a span for its children: K and V of its positions
("Schedule-Level Shared-Prefix Reuse for LLM RL Training", sections 3.3 and 4.1: the forward and the
backward cache), or the state behind its last position and the last inputs of a convolution, its
tail ("Gated Delta Networks"; "Transformers are SSMs"). Gradients are summed in fp32 or wider.

The sidecar belongs to a step, not to the model, so it is in no checkpoint. Every change of state is
checked: a read before the capture, a second consumption or a capture after release is an error
instead of wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.sidecar.arena import (
    Arena,
    DeviceBytes,
    KeyValue,
    LevelReading,
    OwnKeys,
    Payload,
    Reading,
    Rows,
    TailReading,
)
from megatron_prefix.tree.fronts import Front, front_of
from megatron_prefix.tree.payload_map import Form, PayloadMap, one_interval

if TYPE_CHECKING:
    from megatron_prefix.sidecar.arena import LayerArenas
    from megatron_prefix.sidecar.row_exchange import RowExchange

T = TypeVar("T")


class SegmentState(Enum):
    """Life of one inner segment in one layer."""

    EMPTY = "empty"
    CAPTURED = "captured"
    CONSUMED = "consumed"
    FREED = "freed"


@dataclass(eq=False)
class _LayerState:
    """One layer: its payloads, and the states of segments in it.

    Attributes:
        visible: per segment the inner segments whose payloads it reads.
        rereads: whether a backward reads payloads again; autograd saves recurrent states itself.
        states: of segments; missing ones are EMPTY.
    """

    arena: Arena
    visible: tuple[tuple[int, ...], ...]
    rereads: bool
    states: dict[int, SegmentState] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)


class SidecarCache:
    """Payloads and their gradients of one model chunk for one step.

    It tracks the state of every segment in every layer; a layer's payloads are in its arena.

    Args:
        planned: places of payloads, of this rank's part of every segment.
        special: makes the arenas of some layers; None: all are plain ones.
        exchange: of context-parallel ranks, for payloads that every rank has whole; None: without.

    Attributes:
        device_bytes: device memory of the arenas.
        device: where captured payloads are.
        looks_ahead: whether `prefetch` and `release` do something.
    """

    def __init__(
        self,
        planned: PayloadMap,
        forms: Sequence[Form],
        special: LayerArenas | None = None,
        exchange: RowExchange | None = None,
    ) -> None:
        self.map, self.forms, self.exchange = planned, tuple(forms), exchange
        self._special = special
        self.device_bytes, self.device = DeviceBytes(), torch.device("cpu")
        self._layers: list[_LayerState] = []
        for number, form in enumerate(forms):
            rows = planned.rows(form)
            if special is not None and number in special:
                arena = special.arena(number, rows, self.device_bytes)
            else:
                arena = Arena(rows, self.device_bytes)
            self._layers.append(_LayerState(arena, rows.visible, rereads=form.name == "positions"))
        self._ahead = {n for n, layer in enumerate(self._layers) if layer.arena.looks_ahead}
        self.looks_ahead = bool(self._ahead)
        self._made: dict[tuple[int, Any], Any] = {}

    def state(self, layer: int, index: int) -> SegmentState:
        return self._layers[layer].states.get(index, SegmentState.EMPTY)

    def capture(self, layer: int, index: int, payload: Payload) -> None:
        """Copies a segment's payload into its layer's arena.

        A copy, as Megatron frees the storage of K and V under some recompute and offload options. A
        second call comes from activation recomputation and does nothing.
        """
        layer_state = self._layers[layer]
        if index in layer_state.live:
            return
        self._expect(layer, index, SegmentState.EMPTY)
        self.device = payload[0].device
        layer_state.arena.write(index, payload)
        self.captured(layer, index)

    def captured(self, layer: int, index: int) -> None:
        """Marks a segment whose payload is in its layer's arena, or will be by a graph."""
        layer_state = self._layers[layer]
        layer_state.live.add(index)
        layer_state.states[index] = SegmentState.CAPTURED

    def own(self, layer: int, index: int) -> Payload:
        return self.arena(layer, index).own(index)

    def arena(self, layer: int, index: int) -> Arena:
        """Of a layer, in which a segment is captured, and its gradients are not taken."""
        return self._expect(layer, index, SegmentState.CAPTURED).arena

    def own_keys(self, layer: int, index: int, inner: bool, key_value: KeyValue) -> OwnKeys:
        """A segment's own K and V in one call of attention, from this rank's [positions, kv_heads,
        dim] each; those of an `inner` segment are captured, and the copies are used."""
        return self._layers[layer].arena.keys(self, (layer, index), inner, key_value)

    def level(self, index: int, number: int) -> LevelReading:
        """The arguments of a kernel's call for one level; made once a step."""
        reading: LevelReading | None = self._made.get((index, number))
        if reading is None:
            level, parts = self.map.levels[index][number], self.map.shares
            queries = as_rows(self.device, [(run.first, run.stop) for run in level.runs])
            keys = as_rows(self.device, [(run.start, run.end) for run in level.runs])
            key_lengths = tuple(num * parts for num in level.keys)
            reading = LevelReading(keys, index, level.queries, key_lengths, queries)
            self._made[index, number] = reading
        return reading

    def front(self, index: int) -> Front | None:
        """What precedes a segment's own keys; None with context parallelism, or where arenas of
        some layers are not plain ones."""
        if self.exchange is not None or self._special is not None:
            return None
        return front_of(self.map.levels[index], self.map.lengths[index])

    def once(self, index: int, what: Any, make: Callable[[], T]) -> T:
        """`make()`, called once a step for each segment and key `what`."""
        value: T | None = self._made.get((index, what))
        if value is None:
            value = self._made[index, what] = make()
        return value

    def tail(self, index: int, form: Form) -> TailReading | None:
        tail = self.map.tails[form][1][index]
        return TailReading(as_rows(self.device, tail.rows), tail.spans) if tail.rows else None

    def read(self, layer: int, index: int, what: Reading) -> Payload:
        """Rows of other segments: views, or copies if they are not one interval."""
        layer_state = self.check(layer, index)
        return layer_state.arena.read(layer_state.visible[index], what)

    def check(self, layer: int, index: int) -> _LayerState:
        """A layer; raises RuntimeError unless all is there that a segment reads."""
        layer_state = self._layers[layer]
        if not layer_state.live.issuperset(layer_state.visible[index]):
            raise self._closed(layer, index)
        return layer_state

    def add(self, layer: int, index: int, what: Reading, gradients: Payload) -> None:
        """Adds gradients to unique rows of other segments, in fp32 or wider."""
        layer_state = self.check(layer, index)
        layer_state.arena.add(layer_state.visible[index], what, gradients)

    def take(self, layer: int, index: int) -> Payload | None:
        """Gradients from a segment's descendants, only once; None: nothing was sent."""
        self.consume(layer, index)
        return self._layers[layer].arena.sent(index)

    def consume(self, layer: int, index: int) -> None:
        """Marks a segment's gradients as taken, for arenas that sum them themselves."""
        layer_state = self._expect(layer, index, SegmentState.CAPTURED)
        layer_state.states[index] = SegmentState.CONSUMED
        layer_state.live.discard(index)

    def prefetch(self, layer: int, index: int, *, backward: bool = False) -> None:
        """Announces that a segment will run in a layer.

        Args:
            layer: local index; may be out of range.
            backward: whether gradients are needed, too; layers then run from last to first.
        """
        near = layer if self._special is None else self._special.near(layer, backward)
        if near is None or near not in self._ahead:
            return
        layer_state = self._layers[near]
        visible = layer_state.visible[index]
        if not layer_state.live.issuperset(visible):
            return  # `read` will raise
        with_own = (*visible, index) if index in layer_state.live else visible
        reread = with_own if layer_state.rereads else () if backward else visible
        levels = (self.level(index, number) for number in range(len(self.map.levels[index])))
        layer_state.arena.fetch(reread, with_own if backward else (), levels)

    def release(self, layer: int) -> None:
        if layer in self._ahead:
            self._layers[layer].arena.leave()

    def free(self, index: int, *, consumed: bool) -> None:
        """Releases a segment after its backward; an arena is freed with its last segment.
        `consumed`: whether every layer must have taken the gradients (False for forward_only)."""
        expected = SegmentState.CONSUMED if consumed else SegmentState.CAPTURED
        for layer in range(len(self._layers)):
            layer_state = self._expect(layer, index, expected)
            layer_state.states[index] = SegmentState.FREED
            layer_state.live.discard(index)
            if not layer_state.live:
                layer_state.arena.drop()

    def clear(self) -> None:
        for layer in self._layers:
            layer.arena.drop()
            layer.states.clear()
            layer.live.clear()
        self._made.clear()
        if self._special is not None:
            self._special.clear()

    def _closed(self, layer: int, index: int) -> RuntimeError:
        layer_state = self._layers[layer]
        closed = next(
            segment for segment in layer_state.visible[index] if segment not in layer_state.live
        )
        return RuntimeError(
            f"layer {layer}: segment {index} reads segment {closed}, which is"
            f" {self.state(layer, closed).value}: before its forward or after its backward"
        )

    def _expect(self, layer: int, index: int, expected: SegmentState) -> _LayerState:
        """The layer; raises RuntimeError unless the segment is in the state `expected`."""
        layer_state = self._layers[layer]
        state = layer_state.states.get(index, SegmentState.EMPTY)
        if state is not expected:
            raise RuntimeError(
                f"layer {layer}, segment {index}: {state.value}, expected {expected.value}"
            )
        return layer_state


def as_rows(device: torch.device, intervals: Sequence[tuple[int, int]]) -> Rows:
    """Intervals one after another: one interval if they are neighbours, else an index."""
    interval = one_interval(intervals)
    if interval is not None:
        return interval
    index: Tensor = to_device(
        device, np.concatenate([np.arange(*interval) for interval in intervals])
    )
    return index
