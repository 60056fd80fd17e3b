"""Routers' sums by span, of segments that cross data-parallel ranks.

The tokens of a prompt meet the routers on one rank. The microbatches of other ranks that have this
prompt need what their own routers would have counted, and the prompt's routers need the gradients
of those microbatches' losses. Both are few numbers a span and router, sent with its payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device


class SpanSums:
    """One number a span, router and column; columns are those of a router's sums.

    Args:
        segments: those that cross.
        layers: that have a router.
        num_experts: of a router.

    Attributes:
        num_experts: as given.
    """

    def __init__(self, segments: Iterable[int], layers: Iterable[int], num_experts: int) -> None:
        self._segments = frozenset(segments)
        self._places = {layer: place for place, layer in enumerate(sorted(layers))}
        self.num_experts = num_experts
        ends = [0, num_experts, 2 * num_experts, 3 * num_experts, 3 * num_experts + 1]
        names = ("routed", "counts", "masses", "squares")
        self._columns = {name: slice(*ends[n : n + 2]) for n, name in enumerate(names)}
        self._of: dict[int, Tensor] = {}

    def __contains__(self, index: int) -> bool:
        """Whether a segment crosses."""
        return index in self._segments

    def put(self, layer: int, index: int, name: str, sums: Tensor) -> None:
        """Sets the sums of a segment's spans.

        Args:
            layer: of the router.
            index: the segment.
            name: "routed" (tokens sent to each expert), or one of a ledger's sums: "counts",
                "masses", "squares"; or gradients of these.
            sums: [spans, experts], or [spans] for squares.
        """
        if index not in self._of:  # fp64 counts any number of tokens exactly
            shape = len(sums), len(self._places), 3 * self.num_experts + 1
            self._of[index] = sums.new_zeros(shape, dtype=torch.float64)
        part = self._of[index][:, self._places[layer], self._columns[name]]
        part.copy_(sums.reshape(part.shape))

    def get(self, layer: int, index: int, name: str) -> Tensor | None:
        """What `put` has set or `add` has added, fp64, [spans, experts or 1]; None if nothing."""
        full = self._of.get(index)
        return None if full is None else full[:, self._places[layer], self._columns[name]]

    def rows(self, index: int, spans: Sequence[int]) -> tuple[Tensor, ...]:
        """All numbers of some spans of a segment as a payload: one tensor, or none at all."""
        full = self._of.get(index)
        if full is None:
            return ()
        full = full.flatten(1)
        if len(spans) == len(full):
            return (full,)
        return (full.index_select(0, to_device(full.device, np.array(spans, np.int64))),)

    def add(self, index: int, num_spans: int, spans: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Adds rows of some of a segment's spans, as `rows` returns them."""
        for row in rows:
            part = row.view(len(spans), len(self._places), -1)
            if index not in self._of:
                self._of[index] = part.new_zeros((num_spans, *part.shape[1:]))
            numbers = to_device(part.device, np.array(spans, np.int64))
            self._of[index].index_add_(0, numbers, part)
