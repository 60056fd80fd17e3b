"""Numbers that stand for the bits of rows: equal rows have equal ones, on every rank.

A row's words go through functions of their own, drawn once for all ranks, and are added up.  Two
different rows come to the same number with a chance of 2^-63; the tree compares a row with those
that follow the same rows only.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_prefix.device.fusion import has_triton

ROWS = 1024
"""Whose words are looked at together: each is eight bytes."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x1B873593CC9E2D51
"""An odd number; its product moves every bit upwards."""


def fingerprints(rows: Tensor) -> Tensor:
    """Of rows [..., width] of any dtype, int64 [...]."""
    words = rows.contiguous().view(_WORDS[rows.element_size()])
    keys = _keys(words.shape[-1], words.device)
    return _mixed(_row_sums(words.flatten(0, -2), keys)).view(rows.shape[:-1])


def combined(first: Tensor, second: Tensor) -> Tensor:
    """Of pairs of numbers, int64, in the order of the two."""
    return _mixed(_mixed(first) * _FACTOR + second)


def _row_sums(words: Tensor, keys: Tensor) -> Tensor:
    """Of words [rows, width], each by a function of its column, int64 [rows]."""
    if has_triton(words.device.type):
        from megatron_prefix.features.vision.fingerprints_triton import sums_triton

        return sums_triton(words, keys, _FACTOR)
    return torch.cat(
        [_mixed(part.long() ^ keys[0]).mul_(keys[1]).sum(-1) for part in words.split(ROWS)]
    )


def _mixed(x: Tensor) -> Tensor:
    """A permutation of int64 in which every bit depends on all of them."""
    for shift in (30, 27, 31):
        x = (x ^ _right(x, shift)) * _FACTOR
    return x ^ _right(x, 32)


def _right(x: Tensor, shift: int) -> Tensor:
    """Shifted to the right, zeros in front: torch's own repeats the sign, and x and -x-1 would
    come to the same."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


@functools.lru_cache(maxsize=8)
def _keys(width: int, device: torch.device) -> Tensor:
    """Odd numbers, int64 [2, width], the same on every rank."""
    source = torch.Generator().manual_seed(20240229)
    keys = torch.randint(-(2**63), 2**63 - 1, (2, width), generator=source, dtype=torch.int64)
    return (keys | 1).to(device)
