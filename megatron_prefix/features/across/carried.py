"""What crosses data-parallel ranks of a model chunk: payloads of its layers, final hidden states of
segments with loss, and routers' sums.

They look alike from here: tensors by layer with a row a position or a span, and gradients of the
same shapes that come back. Final states are one more layer, and routers of all layers another one,
the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_prefix.features.across.final_states import FinalStates
from megatron_prefix.features.across.ledger import CrossingLedger
from megatron_prefix.sidecar.arena import Payload
from megatron_prefix.sidecar.cache import SidecarCache
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
        return [*self._cache.leaving(index, spans), *extra]

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
        return [*self._cache.sums(index), *extra]

    def add_to(self, index: int, spans: Sequence[int], gradients: Sequence[Payload]) -> None:
        """Adds gradients of what has left here, before the segment runs backward."""
        *layers, states, routed = gradients
        self._cache.add_to(index, spans, layers)
        if self._ledger is not None:
            self._ledger.add_to(index, spans, routed)
        if final := self._final[index]:
            final.add_to(index, spans, states)
