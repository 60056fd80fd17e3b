"""K/V and gK/gV of the inner segments of one layer, in one arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Both = tuple[Tensor, Tensor]
"""Of keys and of values."""
Rows = slice | Tensor
"""Consecutive rows, or an index, int64 [n]."""


class Arena:
    """K, V [rows, kv_heads, dim] on the device, and gK, gV of these shapes in fp32 or wider.

    Args:
        intervals: per segment its rows; None for a wave.
        length: rows.
        key, value: of some positions; they give heads, widths, dtype and device.
        count: called with the bytes that are taken on the device (negative: freed).
    """

    def __init__(
        self,
        intervals: Sequence[slice | None],
        length: int,
        key: Tensor,
        value: Tensor,
        count: Callable[[int], None],
    ) -> None:
        self.intervals, self.length, self.device = intervals, length, key.device
        self._count = count
        self._keys: list[Tensor] = self._make((key, value))
        self._sums: list[Tensor] | None = None

    @property
    def width(self) -> int:
        """Numbers of a key in one head."""
        return self._keys[0].shape[-1]

    def write(self, index: int, key: Tensor, value: Tensor) -> None:
        """Copies a segment's K and V to its rows, where gK and gV are zero from now on."""
        rows = self.intervals[index]
        for whole, part in zip(self._keys, (key, value), strict=True):
            whole[rows].copy_(part)
        for total in self._sums or ():
            total[rows].zero_()

    def read(self, seen: Iterable[int], rows: Rows) -> Both:
        """K and V of some rows, of segments `seen`: views of an interval, copies for an index."""
        key, value = self._keys
        if isinstance(rows, slice):
            return key[rows], value[rows]
        return key.index_select(0, rows), value.index_select(0, rows)

    def add(self, seen: Iterable[int], rows: Rows, gradients: Sequence[Tensor]) -> None:
        """Adds gK and gV of some rows, which are all different."""
        if self._sums is None:
            if isinstance(rows, slice) and len(gradients[0]) == self.length:
                self._sums = [part.to(wide(part), copy=True) for part in gradients]
                self._count(_size(self._sums))
                return
            self._sums = self._make(self._keys, sums=True)
        for total, part in zip(self._sums, gradients, strict=True):
            if isinstance(rows, slice):
                total[rows].add_(part)
            else:
                total.index_add_(0, rows, part.to(total.dtype))

    def sent(self, index: int) -> Both | None:
        """Views of a segment's gK and gV; None where nothing was sent to any segment."""
        if self._sums is None:
            return None
        rows, (key_grad, value_grad) = self.intervals[index], self._sums
        return key_grad[rows], value_grad[rows]

    def fetch(self, seen: Iterable[int], sums: Iterable[int] = ()) -> None:
        """Announces that K and V of segments `seen` will be used, and gK and gV of `sums`. On the
        device there is nothing to do."""

    def leave(self) -> None:
        """Announces that the layer is not used for a while. Here there is nothing to do."""

    def drop(self) -> None:
        """Frees all memory."""
        self._count(-_size(self._keys) - _size(self._sums or []))
        self._keys, self._sums = [], None

    def _make(self, likes: Sequence[Tensor], sums: bool = False) -> list[Tensor]:
        """Memory for K and V, or zeros for gK and gV."""
        made = [
            like.new_zeros((self.length, *like.shape[1:]), dtype=wide(like)) if sums
            else like.new_empty((self.length, *like.shape[1:]))
            for like in likes
        ]  # fmt: skip
        self._count(_size(made))
        return made


def wide(like: Tensor) -> torch.dtype:
    """The dtype in which gradients are summed."""
    return torch.promote_types(like.dtype, torch.float32)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
