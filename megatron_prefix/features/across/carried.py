"""What crosses data-parallel ranks of a model chunk: payloads of its layers, final hidden states of
segments with loss, and routers' sums.

They look alike from here: tensors by layer with a row a position or a span, and gradients of the
same shapes that come back. Final states are one more layer, and routers of all layers another one,
the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_prefix.device.transfer import to_device
from megatron_prefix.features.across.final_states import FinalStates
from megatron_prefix.features.across.ledger import CrossingLedger
from megatron_prefix.sidecar.arena import Payload, Reading, Rows, wider
from megatron_prefix.sidecar.cache import SidecarCache, as_rows
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import Form

Row = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a row of one tensor of a payload."""


class Carried:
    """Payloads and sums of one model chunk in one step.

    Args:
        model: the chunk.
        cache: its sidecar.
        ledger: of its routers; None without routers or gradients.
        final: of a last stage; None elsewhere.
        scored: by segment whether it has final states to leave.

    Attributes:
        model: as given.
        forms: of the layers that leave something, final states and routers last.
        parts: context-parallel ranks, each of which has an equal part of every span's positions.
        gathers: whether each of them keeps the payloads of all.
    """

    def __init__(
        self,
        model: Any,
        cache: SidecarCache,
        ledger: CrossingLedger | None,
        final: FinalStates | None,
        scored: Sequence[bool],
    ) -> None:
        self.model, self._cache, self._ledger = model, cache, ledger
        self._final = [final if one else None for one in scored]
        self.forms, self.parts = (*cache.forms, Form.POSITIONS, Form.SPANS), cache.map.parts
        self.gathers = cache.map.shares < self.parts

    def rows(self, index: int) -> list[list[Row]]:
        """What rows of a segment's payload are, layer by layer."""
        own = [self._cache.own(layer, index) for layer in range(len(self._cache.forms))]
        final = self._final[index]
        own.append(() if final is None else (final.row(index),))
        own.append(() if self._ledger is None else self._ledger.leaving(index, ()))
        return [[(tuple(part.shape[1:]), part.dtype) for part in parts] for parts in own]

    def leaving(self, index: int, spans: Sequence[int]) -> list[Payload]:
        """What some spans of a segment that ran forward here leave."""
        others = self._final[index], self._ledger
        extra = [() if other is None else other.leaving(index, spans) for other in others]
        return [*leaving(self._cache, index, spans), *extra]

    def arrived(self, index: int, payload: Sequence[Payload]) -> None:
        """Takes what a segment of another rank leaves."""
        *layers, states, routed = payload
        for layer, parts in enumerate(layers):
            self._cache.capture(layer, index, parts)
            self._cache.release(layer)
        if self._ledger is not None:
            self._ledger.arrived(index, routed)
        if final := self._final[index]:
            final.arrived(index, states)

    def sums(self, index: int) -> list[Payload]:
        """Gradients of what has `arrived`; only once."""
        others = self._final[index], self._ledger
        extra = [() if other is None else other.sums(index) for other in others]
        return [*sums(self._cache, index), *extra]

    def add_to(self, index: int, spans: Sequence[int], gradients: Sequence[Payload]) -> None:
        """Adds gradients of what has left here, before the segment runs backward."""
        *layers, states, routed = gradients
        add_to(self._cache, index, spans, layers)
        if self._ledger is not None:
            self._ledger.add_to(index, spans, routed)
        if final := self._final[index]:
            final.add_to(index, spans, states)


def leaving(cache: SidecarCache, index: int, spans: Sequence[int]) -> list[Payload]:
    """Payloads of spans of a segment on this rank, per layer: views, or copies if the spans are not
    neighbours."""
    payloads = []
    for layer in range(len(cache.forms)):
        what = Reading(_rows_of(cache, layer, index, spans))
        payloads.append(cache.arena(layer, index).read((index,), what))
        cache.release(layer)
    return payloads


def sums(cache: SidecarCache, index: int) -> list[Payload]:
    """Gradients from a segment's descendants per layer, zeros if none; only once."""
    gradients = []
    for layer in range(len(cache.forms)):
        own, rows = cache.own(layer, index), _held_rows(cache, layer, index)
        num = len(own[0]) if rows is None else len(rows)
        zeros = (
            tensor.new_zeros((num, *tensor.shape[1:]), dtype=wider(tensor.dtype)) for tensor in own
        )
        gradients.append(cache.take(layer, index) or tuple(zeros))
        cache.release(layer)
    return gradients


def add_to(
    cache: SidecarCache, index: int, spans: Sequence[int], gradients: Sequence[Payload]
) -> None:
    """Adds gradients per layer that another rank's descendants of `spans` send back."""
    for layer, parts in enumerate(gradients):
        what = Reading(_rows_of(cache, layer, index, spans))
        cache.arena(layer, index).add((index,), what, parts)
        cache.release(layer)


def _rows_of(cache: SidecarCache, layer: int, index: int, spans: Sequence[int]) -> Rows:
    """Arena rows of this rank's part of `spans`."""
    form, device = cache.forms[layer], cache.device
    interval, held = cache.map.rows(form).intervals[index], _held_rows(cache, layer, index)
    if interval is None:
        raise RuntimeError(f"segment {index} is a wave: it leaves nothing here")
    local = [form.rows(length, cache.map.parts) for length in cache.map.lengths[index]]
    ends = [*itertools.accumulate(local, initial=0)]
    bounds = [(ends[span], ends[span + 1]) for span in spans]
    if held is None:
        start = interval.start
        return as_rows(device, [(start + begin, start + end) for begin, end in bounds])
    rows = np.concatenate([held[begin:end] for begin, end in bounds])
    return to_device(device, rows + interval.start)


def _held_rows(cache: SidecarCache, layer: int, index: int) -> cp_layout.Index | None:
    """Rows of this rank's positions within a segment, span after span, where it keeps those of all
    context-parallel ranks; None: its rows are its own."""
    keeps_all = cache.map.shares < cache.map.parts and cache.forms[layer] == Form.POSITIONS
    if not keeps_all or (ranks := cache.exchange) is None:
        return None
    return cp_layout.held_positions(cache.map.lengths[index], ranks.rank, ranks.size)
