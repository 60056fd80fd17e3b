"""Blocks of attention over disjoint keys, merged by log-sum-exp.

With S_i the scores of a query and the keys of block i, the block gives
lse_i = log sum exp S_i and out_i = sum softmax(S_i) v. The softmax over all keys is then

    lse = log sum_i exp(lse_i)          out = sum_i exp(lse_i - lse) * out_i

("FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving", section 2.2).
The order of the blocks does not matter.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_prefix.attention.interface import Partial

logger = logging.getLogger(__name__)

Merged = tuple[Tensor, Tensor]
_Merge = Callable[[list[Tensor], list[Tensor], torch.dtype], Merged]

MOST_PARTS = 3
"""Parts merged in one pass. The fused pass is compiled for every number of parts, and torch stops
compiling after eight versions of a function."""


def merge(parts: Sequence[Partial]) -> Merged:
    """(out [s, h, dv], lse [h, s]) of queries that see the keys of all ``parts``.

    Every part covers all queries. Where a query sees no key of a part, lse is -inf and out, which
    may be anything, counts as 0. A single part is returned unchanged. Sums are in lse's dtype and
    rounded once to out's dtype; on CUDA `MOST_PARTS` are merged in one fused pass.

    Raises ValueError for no parts or parts of different shapes.
    """
    if not parts:
        raise ValueError("nothing to merge: a query sees at least its own key")
    outs, lses = [part.out for part in parts], [part.lse for part in parts]
    shapes = {(out.shape, lse.shape) for out, lse in zip(outs, lses, strict=True)}
    if len(shapes) > 1:
        raise ValueError(f"parts of different shapes: {sorted(map(str, shapes))}")
    if len(parts) == 1:
        return parts[0].out, parts[0].lse
    combine, dtype = _implementation(outs[0].device.type), outs[0].dtype
    while len(outs) > MOST_PARTS:
        out, lse = combine(outs[:MOST_PARTS], lses[:MOST_PARTS], lses[0].dtype)
        outs, lses = [out, *outs[MOST_PARTS:]], [lse, *lses[MOST_PARTS:]]
    return combine(outs, lses, dtype)


def _merge(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype) -> Merged:
    """The formula, rounded to `dtype`; the largest lse is subtracted, so no exp overflows."""
    largest = lses[0]
    for lse in lses[1:]:
        largest = torch.maximum(largest, lse)
    # A query without any key has -inf everywhere; 0 instead avoids -inf - -inf.
    origin = torch.where(torch.isneginf(largest), 0.0, largest)
    weights = [torch.exp(lse - origin) for lse in lses]
    total = sum(weights[1:], weights[0])
    share = torch.where(total == 0, 0.0, 1.0 / total)
    out = torch.zeros((), dtype=largest.dtype, device=largest.device)
    for part, weight in zip(outs, weights, strict=True):
        # where() instead of a product: a block with weight 0 may hold NaN. A NaN with another
        # weight stays visible.
        factor = _by_query(weight * share)
        out = out + torch.where(factor == 0, 0.0, part.to(out.dtype) * factor)
    return out.to(dtype).contiguous(), origin + torch.log(total)


def _by_query(x: Tensor) -> Tensor:
    """[h, s] -> [s, h, 1], to scale an output."""
    return x.transpose(0, 1).unsqueeze(-1)


@functools.cache
def _implementation(device_type: str) -> _Merge:
    """`_merge` on the CPU; on CUDA compiled into one pass, or eager if compiling fails."""
    if device_type != "cuda":
        return _merge
    compiled = torch.compile(_merge, dynamic=True)
    failed = False

    def fused(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype) -> Merged:
        nonlocal failed
        if not failed:
            try:
                return compiled(outs, lses, dtype)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - no compiler, no Triton, ...
                failed = True
                reason = str(error).strip().splitlines()[0]
                logger.warning(
                    "attention blocks are merged without fusion, which is slower: "
                    "torch.compile failed with %s: %s",
                    type(error).__name__,
                    reason,
                )
        return _merge(outs, lses, dtype)

    return fused
