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

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import on
from megatron_prefix.sidecar.arena import (
    Arena,
    Both,
    DeviceBytes,
    Lengths,
    LevelReading,
    OwnKeys,
    Payload,
    Reading,
    Rows,
    TailReading,
    wider,
)
from megatron_prefix.tree.payload_map import Form, PayloadMap, RowMap, one_interval

if TYPE_CHECKING:
    from megatron_prefix.sidecar.context_parallel import Exchange
    from megatron_prefix.sidecar.host_arena import HostLayers

T = TypeVar("T")
Transport = Callable[[RowMap, DeviceBytes, tuple[Lengths, ...]], Arena]
"""Makes the arena of a layer whose rows cross ranks; it gets the lengths of all segments' spans."""


class SegmentState(Enum):
    """Life of one inner segment in one layer."""

    EMPTY = "empty"
    CAPTURED = "captured"
    CONSUMED = "consumed"
    FREED = "freed"


@dataclass(eq=False)
class _Layer:
    """One layer: its payloads, and how far the segments are in it.

    Attributes:
        arena: with the payloads.
        seen: per segment the inner segments whose payloads it reads.
        rereads: whether a backward reads payloads again; states autograd has.
        states: of segments; those that are missing are empty.
        live: the segments that are captured.
    """

    arena: Arena
    seen: tuple[tuple[int, ...], ...]
    rereads: bool
    states: dict[int, SegmentState] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)


class SidecarCache:
    """Payloads and their gradients of one model chunk for one step.

    It knows the life of every segment in every layer; a layer's payloads are in its arena.

    Args:
        planned: where they lie; of this rank's part of every segment.
        forms: of the payloads of the layers that leave one, in the order in which they run.
        host: layers whose arena is on the host, and on the device only while it is used.
        transport: how rows of positions cross ranks; None: they do not.
        exchange: of context-parallel ranks, for what each of them has the whole of; None: without.

    Attributes:
        map, forms, exchange: as given.
        device_bytes: what the arenas take.
        looks_ahead: whether `prefetch` and `release` do something.
    """

    def __init__(
        self,
        planned: PayloadMap,
        forms: Sequence[Form],
        host: HostLayers | None = None,
        transport: Transport | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.map, self.forms, self.exchange = planned, tuple(forms), exchange
        self._host = host
        self.device_bytes, self._device = DeviceBytes(), torch.device("cpu")
        self._layers: list[_Layer] = []
        for number, form in enumerate(forms):
            rows = planned.rows(form)
            # All positions are exchanged; of last ones every rank has a copy.
            if transport is not None and form == Form.POSITIONS:
                arena = transport(rows, self.device_bytes, planned.lengths)
            elif host is not None and number in host:
                arena = host.arena(rows, self.device_bytes)
            else:
                arena = Arena(rows, self.device_bytes)
            self._layers.append(_Layer(arena, rows.visible, rereads=form.name == "positions"))
        self._ahead = {n for n, one in enumerate(self._layers) if one.arena.looks_ahead}
        self.looks_ahead = bool(self._ahead)
        self._made: dict[tuple[int, Any], Any] = {}

    def state(self, layer: int, index: int) -> SegmentState:
        """State of segment `index` in `layer`."""
        return self._layers[layer].states.get(index, SegmentState.EMPTY)

    def capture(self, layer: int, index: int, payload: Payload) -> None:
        """Copies a segment's payload into its layer's arena.

        It is copied because Megatron frees the storage of K and V under some recompute and offload
        options. A second call comes from activation recomputation and changes nothing.
        """
        one = self._layers[layer]
        if index in one.live:
            return
        self._expect(layer, index, SegmentState.EMPTY)
        self._device = payload[0].device
        one.arena.write(index, payload)
        one.live.add(index)
        one.states[index] = SegmentState.CAPTURED

    def own(self, layer: int, index: int) -> Payload:
        """The payload of the segment itself, views."""
        return self._expect(layer, index, SegmentState.CAPTURED).arena.own(index)

    def own_keys(self, layer: int, index: int, inner: bool, both: Both) -> OwnKeys:
        """A segment's own K and V for one call of its attention, of this rank's [positions,
        kv_heads, dim] each; captured if others read it (`inner`), and then those are used."""
        return self._layers[layer].arena.keys(self, (layer, index), inner, both)

    def level(self, index: int, number: int) -> LevelReading:
        """A segment's level as a kernel's call needs it; made once a step."""
        made: LevelReading | None = self._made.get((index, number))
        if made is None:
            level, parts = self.map.levels[index][number], self.map.shares
            queries = _rows(self._device, [(run.first, run.stop) for run in level.runs])
            keys = _rows(self._device, [(run.start, run.end) for run in level.runs])
            seen = tuple(num * parts for num in level.keys)
            made = LevelReading(keys, index, level.queries, seen, queries)
            self._made[index, number] = made
        return made

    def once(self, index: int, what: Any, make: Callable[[], T]) -> T:
        """What layers need to know of a segment, made in the first that asks, for the whole step.

        Args:
            index: the segment.
            what: distinguishes it from other such things.
            make: makes it.
        """
        made: T | None = self._made.get((index, what))
        if made is None:
            made = self._made[index, what] = make()
        return made

    def tail(self, index: int, form: Form) -> TailReading | None:
        """What a segment reads of last positions; None if it reads nothing."""
        tail = self.map.tails[form][1][index]
        return TailReading(_rows(self._device, tail.rows), tail.spans) if tail.rows else None

    def read(self, layer: int, index: int, what: Reading) -> Payload:
        """What a segment reads of others: views, or copies if its rows are not one interval."""
        one = self._layers[layer]
        if not one.live.issuperset(one.seen[index]):
            raise self._closed(layer, index)
        return one.arena.read(one.seen[index], what)

    def add(self, layer: int, index: int, what: Reading, gradients: Payload) -> None:
        """Adds what a segment sends to rows, all different; the sums are fp32 or wider."""
        one = self._layers[layer]
        if not one.live.issuperset(one.seen[index]):
            raise self._closed(layer, index)
        one.arena.add(one.seen[index], what, gradients)

    def take(self, layer: int, index: int) -> Payload | None:
        """What a segment's descendants have sent; only once. None if nothing was sent."""
        self.consume(layer, index)
        return self._layers[layer].arena.sent(index)

    def consume(self, layer: int, index: int) -> None:
        """Notes that a segment's gradients are taken; `take` does."""
        one = self._expect(layer, index, SegmentState.CAPTURED)
        one.states[index] = SegmentState.CONSUMED
        one.live.discard(index)

    def leaving(self, index: int, spans: Sequence[int]) -> list[Payload]:
        """What some spans of a segment leave on this rank in every layer: views, or copies if they
        are not neighbours."""
        payloads = []
        for layer in range(len(self._layers)):
            arena = self._expect(layer, index, SegmentState.CAPTURED).arena
            what = Reading(self._rows_of(layer, index, spans))
            payloads.append(arena.read((index,), what))
            self.release(layer)
        return payloads

    def sums(self, index: int) -> list[Payload]:
        """What a segment's descendants have sent in every layer, zeros if nothing; only once."""
        gradients = []
        for layer in range(len(self._layers)):
            own, mine = self.own(layer, index), self._layers[layer].arena.mine(index)
            num = len(own[0]) if mine is None else len(mine)
            zeros = (one.new_zeros((num, *one.shape[1:]), dtype=wider(one.dtype)) for one in own)
            gradients.append(self.take(layer, index) or tuple(zeros))
            self.release(layer)
        return gradients

    def add_to(self, index: int, spans: Sequence[int], gradients: Sequence[Payload]) -> None:
        """Adds in every layer what another rank's descendants of some spans send back."""
        for layer, parts in enumerate(gradients):
            arena = self._expect(layer, index, SegmentState.CAPTURED).arena
            arena.add((index,), Reading(self._rows_of(layer, index, spans)), parts)
            self.release(layer)

    def _rows_of(self, layer: int, index: int, spans: Sequence[int]) -> Rows:
        """Rows of this rank's part of some spans of a segment in a layer's arena."""
        form, lengths = self.forms[layer], self.map.lengths[index]
        whole, mine = self.map.rows(form).intervals[index], self._layers[layer].arena.mine(index)
        if whole is None:
            raise RuntimeError(f"segment {index} is a wave: it leaves nothing here")
        local = [form.rows(length, self.map.parts) for length in lengths]
        ends = [*itertools.accumulate(local, initial=0)]
        bounds = [(ends[span], ends[span + 1]) for span in spans]
        if mine is None:
            start = whole.start
            return _rows(self._device, [(start + begin, start + end) for begin, end in bounds])
        rows = np.concatenate([mine[begin:end] for begin, end in bounds])
        return on(self._device, rows + whole.start)

    def prefetch(self, layer: int, index: int, *, backward: bool = False) -> None:
        """Announces that a segment will run in a layer.

        Args:
            layer: local index; it may be out of range.
            index: the segment.
            backward: whether gradients are needed, too; layers then run from the last to the first.
        """
        near = layer if self._host is None else self._host.near(layer, backward)
        if near is None or near not in self._ahead:
            return
        one = self._layers[near]
        seen = one.seen[index]
        if not one.live.issuperset(seen):
            return  # whoever reads them will be told
        mine = (*seen, index) if index in one.live else seen
        again = mine if one.rereads else () if backward else seen
        levels = (self.level(index, number) for number in range(len(self.map.levels[index])))
        one.arena.fetch(again, mine if backward else (), levels)

    def release(self, layer: int) -> None:
        """Tells that a segment is done in a layer."""
        if layer in self._ahead:
            self._layers[layer].arena.leave()

    def free(self, index: int, *, consumed: bool) -> None:
        """Releases a segment after its backward; an arena is freed with the last one in it.

        Args:
            index: the segment.
            consumed: whether every layer must have taken the gradients (False for forward_only).
        """
        wanted = SegmentState.CONSUMED if consumed else SegmentState.CAPTURED
        for layer in range(len(self._layers)):
            one = self._expect(layer, index, wanted)
            one.states[index] = SegmentState.FREED
            one.live.discard(index)
            if not one.live:
                one.arena.drop()

    def clear(self) -> None:
        """Drops everything in any state: at the end of a step, also of a failed one."""
        for one in self._layers:
            one.arena.drop()
            one.states.clear()
            one.live.clear()
        self._made.clear()
        if self._host is not None:
            self._host.clear()

    def _closed(self, layer: int, index: int) -> RuntimeError:
        """What is wrong if `index` reads a segment that is not captured, or is consumed."""
        one = self._layers[layer]
        closed = next(seen for seen in one.seen[index] if seen not in one.live)
        return RuntimeError(
            f"layer {layer}: segment {index} reads segment {closed}, which is"
            f" {self.state(layer, closed).value}: before its forward or after its backward"
        )

    def _expect(self, layer: int, index: int, wanted: SegmentState) -> _Layer:
        """The layer, in which a segment is in the state `wanted`."""
        one = self._layers[layer]
        state = one.states.get(index, SegmentState.EMPTY)
        if state is not wanted:
            raise RuntimeError(
                f"layer {layer}, segment {index}: {state.value}, expected {wanted.value}"
            )
        return one


def _rows(device: torch.device, intervals: Sequence[tuple[int, int]]) -> Rows:
    """Intervals one after another: one interval if they are neighbours, else an index."""
    whole = one_interval(intervals)
    if whole is not None:
        return whole
    index: Tensor = on(device, np.concatenate([np.arange(*interval) for interval in intervals]))
    return index
