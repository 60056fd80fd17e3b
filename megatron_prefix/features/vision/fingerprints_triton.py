"""Sums of `fingerprints` as one pass over memory, in Triton.

torch's own operators make eleven passes, of eight bytes a word: 38 ms of a step with images of
Qwen3-VL-8B's widths on an H200 (benchmarks/LOG.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Words that a program looks at together."""


@triton.jit
def _shifted(x, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """To the right, zeros in front: see `_right` of fingerprints.py."""
    return (x >> SHIFT) & ((1 << (64 - SHIFT)) - 1)


@triton.jit(do_not_specialize=["width"])
def _sums_kernel(words, keys, out, width, FACTOR: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """A program is a row: words [rows, width], keys int64 [2, width], out int64 [rows]."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(words + row * width + column, mask=inside, other=0).to(tl.int64)
        x ^= tl.load(keys + column, mask=inside, other=0)
        x = (x ^ _shifted(x, 30)) * FACTOR
        x = (x ^ _shifted(x, 27)) * FACTOR
        x = (x ^ _shifted(x, 31)) * FACTOR
        x = x ^ _shifted(x, 32)
        total += x * tl.load(keys + width + column, mask=inside, other=0)  # 0 where there is none
    tl.store(out + row, tl.sum(total, 0))


def sums_triton(words: Tensor, keys: Tensor, factor: int) -> Tensor:
    """Of words [rows, width], contiguous on a GPU, and keys int64 [2, width]; int64 [rows]."""
    out = torch.empty(len(words), dtype=torch.int64, device=words.device)
    if len(words):
        _sums_kernel[(len(words),)](words, keys, out, words.shape[1], FACTOR=factor, BLOCK=BLOCK)
    return out
