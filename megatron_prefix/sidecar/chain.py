"""K/V and gK/gV of one chain of chunks in one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Sent = tuple[Tensor, Tensor]


class Chain:
    """K, V [positions, kv_heads, dim] on the device, and gK, gV of these shapes in fp32 or wider.

    Args:
        length: positions of the whole chain.
        key, value: of some positions; they give heads, widths, dtype and device.
        count: called with the bytes that are taken on the device (negative: freed).

    Attributes:
        num_open: the first positions that are captured and not consumed; only these may be read.
    """

    def __init__(
        self, length: int, key: Tensor, value: Tensor, count: Callable[[int], None]
    ) -> None:
        self.num_open = 0
        self._count = count
        self._keys: list[Tensor] = self._make(length, (key, value))
        self._gradients: list[Tensor] | None = None

    def write(self, span: slice, key: Tensor, value: Tensor) -> None:
        """Copies K and V of a segment to its place."""
        for whole, part in zip(self._keys, (key, value), strict=True):
            whole[span].copy_(part)

    def read(self, stop: int) -> Sent:
        """Views of the first `stop` positions of K and V."""
        key, value = self._keys
        return key[:stop], value[:stop]

    def add(self, stop: int, start: int, key_grad: Tensor, value_grad: Tensor) -> None:
        """Adds gK and gV of positions from `start` on, all before `stop`."""
        parts = key_grad, value_grad
        if self._gradients is None:
            if all(p.shape == k.shape for p, k in zip(parts, self._keys, strict=True)):
                self._gradients = [part.to(wide(part), copy=True) for part in parts]
                self._count(_size(self._gradients))
                return
            self._gradients = self._make(len(self._keys[0]), self._keys, sums=True)
        for total, part in zip(self._gradients, parts, strict=True):
            total[start : start + len(part)].add_(part)

    def sent(self, span: slice) -> Sent | None:
        """Views of a segment's gK and gV; None where nothing was sent."""
        if self._gradients is None:
            return None
        key_grad, value_grad = self._gradients
        return key_grad[span], value_grad[span]

    def fetch(self, loaded: int, length: int, *, gradients: bool) -> None:
        """Announces that `length` positions will be used, of which the first `loaded` have been
        written. On the device there is nothing to do."""

    def leave(self) -> None:
        """Announces that the chain is not used for a while. Here there is nothing to do."""

    def drop(self) -> None:
        """Frees all memory."""
        self._count(-_size(self._keys) - _size(self._gradients or []))
        self._keys, self._gradients = [], None

    def _make(self, length: int, likes: Sequence[Tensor], sums: bool = False) -> list[Tensor]:
        """Memory for K and V, or zeros for gK and gV."""
        made = [
            like.new_zeros((length, *like.shape[1:]), dtype=wide(like)) if sums
            else like.new_empty((length, *like.shape[1:]))
            for like in likes
        ]  # fmt: skip
        self._count(_size(made))
        return made


def wide(like: Tensor) -> torch.dtype:
    """The dtype in which gradients are summed."""
    return torch.promote_types(like.dtype, torch.float32)


def _size(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
