"""Arenas that keep their places from step to step, so that graphs can read and write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.features.graphs.choice import power
from megatron_prefix.sidecar.arena import Arena, DeviceBytes, Payload, wider
from megatron_prefix.tree.payload_map import Form, RowMap

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext

FEW_ROWS = 128
"""Spare rows behind those of an arena. A segment with fewer keys, or spans, than its form reads
these instead, and adds zeros to their gradients. There are several where rows are small, as
additions to one row wait for one another."""
STEPS = 4
"""Numbers of rows that forms have between two powers of two."""


def stepped(number: int, least: int) -> int:
    """So many or more, of few values, in steps of `least` or more."""
    step = max(least, power(number) // (2 * STEPS))
    return -(-number // step) * step


def num_spare(form: Form) -> int:
    """Spare rows of an arena; a row of spans may be megabytes."""
    return 1 if form == Form.SPANS else FEW_ROWS


def spare_rows(num: int, first: int) -> np.ndarray:
    """So many, one after the other."""
    return first + np.arange(num) % FEW_ROWS


def interval_of(rows: RowMap, index: int) -> slice:
    """The rows of an inner segment."""
    interval = rows.intervals[index]
    if interval is None:
        raise RuntimeError(f"segment {index} is a wave: it leaves nothing here")
    return interval


def _numbers(rows: Tensor) -> tuple[torch.dtype, torch.Size]:
    return rows.dtype, rows.shape[1:]


class PlacedArenas:
    """Arenas of one model chunk that keep their places from step to step; see LayerArenas.

    Attributes:
        values, sums: of each layer, [capacity + num_spare, ...]; empty before its first payload.
        capacity: by form of payload, rows without the spare ones.
        changes: how often other places had to be made.
        layers: those of the step that runs.
        forms: of all layers that have places, by their numbers.
    """

    def __init__(self) -> None:
        self.values: dict[int, list[Tensor]] = {}
        self.sums: dict[int, list[Tensor]] = {}
        self.layers: dict[int, PlacedArena] = {}
        self.capacity, self.changes = Counter[Form](), 0
        self.forms: dict[int, Form] = {}

    def begin(self, forms: Sequence[Form], rows: Mapping[Form, int]) -> PlacedArenas:
        """Before an attempt with layers of these forms; those have places of which `rows` says how
        many there are."""
        self.forms = {n: form for n, form in enumerate(forms) if form in rows}
        self.layers.clear()
        if any(number > self.capacity[form] for form, number in rows.items()):
            before = self.capacity
            self.give_back()
            for form, number in rows.items():
                self.capacity[form] = max(before[form], stepped(number, num_spare(form)))
        return self

    def give_back(self) -> None:
        """Frees all places."""
        self.values, self.sums = {}, {}
        self.capacity, self.changes = Counter(), self.changes + 1

    def __contains__(self, layer: int) -> bool:
        return layer in self.forms

    def near(self, layer: int, backward: bool) -> int | None:
        return None

    def arena(self, layer: int, rows: RowMap, device_bytes: DeviceBytes) -> Arena:
        self.layers[layer] = PlacedArena(rows, device_bytes, self, layer)
        return self.layers[layer]

    def clear(self) -> None:
        self.layers.clear()

    def placed(self, layer: int, likes: Sequence[Tensor], *, sums: bool) -> list[Tensor]:
        """The places of a layer's payloads, or of their gradients; made like payloads `likes`."""
        places, first = self.sums if sums else self.values, self.capacity[self.forms[layer]]
        made = [
            like.new_empty((0, *like.shape[1:]), dtype=wider(like.dtype) if sums else like.dtype)
            for like in likes
        ]
        there = places.get(layer)
        if there is None or [*map(_numbers, there)] != [*map(_numbers, made)]:
            self.changes += there is not None
            num = first + num_spare(self.forms[layer])
            places[layer] = [like.new_empty((num, *like.shape[1:])) for like in made]
            for place in places[layer]:
                place[first:].zero_()
        return places[layer]

    @property
    def device_bytes(self) -> int:
        """Of all places."""
        lists = (*self.values.values(), *self.sums.values())
        return sum(place.nbytes for places in lists for place in places)


class PlacedArena(Arena):
    """One of them, in one step."""

    def __init__(
        self, rows: RowMap, device_bytes: DeviceBytes, owner: PlacedArenas, layer: int
    ) -> None:
        super().__init__(rows, device_bytes)
        self._owner, self._layer, self._written = owner, layer, 0

    def enter(self, context: SegmentContext) -> None:
        """Before a graph runs a segment in its layer."""
        is_read = bool(context.num_levels or self.rows.zeros)
        if is_read or context.inner:
            if not self.values:
                self.allocate(self._owner.values[self._layer])
            self.reuse_sums()

    def reuse(self, index: int) -> None:
        """Before a graph writes a segment's payload."""
        rows = interval_of(self.rows, index)
        if rows.start < self._written:  # of an earlier segment
            for total in self.sums:
                total[rows].zero_()
        self._written = max(self._written, rows.stop)

    def write(self, index: int, payload: Payload) -> None:
        super().write(index, payload)
        self._written = max(self._written, interval_of(self.rows, index).stop)

    def add(self, visible: Collection[int], what: Any, gradients: Payload) -> None:
        self.reuse_sums()
        super().add(visible, what, gradients)

    def reuse_sums(self) -> None:
        """Before gradients are added."""
        if not self.sums:
            self.allocate(self.values, sums=True)

    def allocate(self, likes: Sequence[Tensor], *, sums: bool = False) -> None:
        places = self._owner.placed(self._layer, likes, sums=sums)
        tensors = [place[: self.rows.length] for place in places]
        self._device_bytes.add(sum(tensor.nbytes for tensor in tensors))
        if sums:
            self.sums = [tensor.zero_() for tensor in tensors]
        else:
            self.values, self.width = tensors, tensors[0].shape[-1]
            for tensor in tensors:
                tensor[: self.rows.zeros].zero_()
