"""The merge of two or three attention blocks as one pass over memory, in Triton.

It computes `formula` of merge.py, which runs where there is no Triton. Every output is
read once and the result written once. torch.compile makes as fast a kernel for one number of
queries, for any number a slower one, and compiles for seconds (benchmarks/LOG.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32
"""Queries that a program merges, of one head."""


@triton.jit
def _exp_weight(lse, largest):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """exp(lse - largest); 0 if no block of the query has a key, instead of -inf - -inf."""
    return tl.exp(lse - tl.where(largest == float("-inf"), 0.0, largest))


@triton.jit
def _share(part, places, inside, weight, share):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """A block's output by its share. A block with share 0 counts as 0, whatever it holds."""
    factor = (weight * share)[:, None]
    value = tl.load(part + places, mask=inside, other=0.0).to(weight.dtype)
    return tl.where(factor == 0, 0.0, value * factor)


@triton.jit(do_not_specialize=["rows", "heads"])
def _merge_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    a, b, c, lse_a, lse_b, lse_c, out, lse_out, rows, heads,  # noqa: ANN001
    NUM: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Outputs [rows, heads, WIDTH] and log-sum-exps [heads, rows]; a program is (head, queries)."""
    head, row = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range, column = row < rows, tl.arange(0, PADDED)
    of_row = head.to(tl.int64) * rows + row
    places = (row.to(tl.int64)[:, None] * heads + head) * WIDTH + column[None, :]
    inside = in_range[:, None] & (column < WIDTH)[None, :]
    first = tl.load(lse_a + of_row, mask=in_range, other=0.0)
    second = tl.load(lse_b + of_row, mask=in_range, other=0.0)
    largest = tl.maximum(first, second)
    if NUM == 3:
        third = tl.load(lse_c + of_row, mask=in_range, other=0.0)
        largest = tl.maximum(largest, third)
    weight_a, weight_b = _exp_weight(first, largest), _exp_weight(second, largest)
    total = weight_a + weight_b
    if NUM == 3:
        weight_c = _exp_weight(third, largest)
        total += weight_c
    share = tl.where(total == 0, 0.0, 1.0 / total)
    merged = _share(a, places, inside, weight_a, share)
    merged += _share(b, places, inside, weight_b, share)
    if NUM == 3:
        merged += _share(c, places, inside, weight_c, share)
    tl.store(out + places, merged.to(out.dtype.element_ty), mask=inside)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(lse_out + of_row, origin + tl.log(total), mask=in_range)


def merge_triton(
    outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out [s, h, dv] of `dtype`, lse [h, s]) of two or three blocks on a GPU."""
    parts, sums = [out.contiguous() for out in outs], [lse.contiguous() for lse in lses]
    rows, heads, width = parts[0].shape
    out, lse = torch.empty_like(parts[0], dtype=dtype), torch.empty_like(sums[0])
    grid = heads, triton.cdiv(rows, BLOCK)
    _merge_kernel[grid](
        parts[0], parts[1], parts[-1], sums[0], sums[1], sums[-1], out, lse, rows, heads,
        NUM=len(parts), WIDTH=width, PADDED=triton.next_power_of_2(width), BLOCK=BLOCK,
    )  # fmt: skip
    return out, lse
