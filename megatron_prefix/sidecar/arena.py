"""Payloads of the inner segments of one layer, and their gradients, in one arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megatron_prefix.tree.payload_map import RowMap

Payload = tuple[Tensor, ...]
"""What a layer leaves in some rows, [rows, ...] each: K and V; or a state and a tail."""
Both = tuple[Tensor, Tensor]
"""Of keys and of values."""
Rows = slice | Tensor
"""Consecutive rows, or an index, int64 [n]."""


class Arena:
    """A payload's tensors [rows, ...] on the device, and their gradients in fp32 or wider.

    Args:
        rows: where segments lie.
        likes: a payload of some rows; it gives widths, dtypes and the device.
        count: called with the bytes that are taken on the device (negative: freed).
    """

    def __init__(self, rows: RowMap, likes: Sequence[Tensor], count: Callable[[int], None]) -> None:
        self.rows, self.device = rows, likes[0].device
        self._count = count
        self._values: list[Tensor] = self._make(likes)
        self._sums: list[Tensor] | None = None

    @property
    def width(self) -> int:
        """Numbers in the last dimension of the first tensor: of a key in one head."""
        return self._values[0].shape[-1]

    def write(self, index: int, payload: Sequence[Tensor]) -> None:
        """Copies a segment's payload to its rows, whose gradients are zero from now on."""
        rows = self.rows.intervals[index]
        for whole, part in zip(self._values, payload, strict=True):
            whole[rows].copy_(part)
        for total in self._sums or ():
            total[rows].zero_()

    def read(self, seen: Iterable[int], rows: Rows) -> Payload:
        """Some rows, of segments `seen`: views of an interval, copies for an index."""
        if isinstance(rows, slice):
            return tuple(whole[rows] for whole in self._values)
        return tuple(whole.index_select(0, rows) for whole in self._values)

    def add(self, seen: Iterable[int], rows: Rows, gradients: Sequence[Tensor]) -> None:
        """Adds gradients of some rows, which are all different."""
        if self._sums is None:
            if isinstance(rows, slice) and len(gradients[0]) == self.rows.length:
                self._sums = [part.to(wide(part), copy=True) for part in gradients]
                self._count(_size(self._sums))
                return
            self._sums = self._make(self._values, sums=True)
        for total, part in zip(self._sums, gradients, strict=True):
            if isinstance(rows, slice):
                total[rows].add_(part)
            else:
                total.index_add_(0, rows, part.to(total.dtype))

    def sent(self, index: int) -> Payload | None:
        """Views of a segment's gradients; None if nothing was sent to any segment."""
        if self._sums is None:
            return None
        rows = self.rows.intervals[index]
        return tuple(total[rows] for total in self._sums)

    def fetch(self, seen: Iterable[int], sums: Iterable[int] = ()) -> None:
        """Announces that payloads of segments `seen` will be used, and gradients of `sums`. On the
        device there is nothing to do."""

    def leave(self) -> None:
        """Announces that the layer is not used for a while. Here there is nothing to do."""

    def drop(self) -> None:
        """Frees all memory."""
        self._count(-_size(self._values) - _size(self._sums or []))
        self._values, self._sums = [], None

    def _make(self, likes: Sequence[Tensor], sums: bool = False) -> list[Tensor]:
        """Memory for a payload, or zeros for its gradients."""
        made = [
            like.new_zeros((self.rows.length, *like.shape[1:]), dtype=wide(like)) if sums
            else like.new_empty((self.rows.length, *like.shape[1:]))
            for like in likes
        ]  # fmt: skip
        self._count(_size(made))
        with torch.no_grad():
            for whole in made:
                for row in range(self.rows.zeros):
                    whole[row].zero_()
        return made


def wide(like: Tensor) -> torch.dtype:
    """The dtype in which gradients are summed."""
    return torch.promote_types(like.dtype, torch.float32)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
