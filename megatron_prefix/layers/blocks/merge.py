"""Blocks of attention over disjoint keys, merged by log-sum-exp; and attention sinks.

With S_i the scores of a query and the keys of block i, the block gives
lse_i = log sum exp S_i and out_i = sum softmax(S_i) v. The softmax over all keys is then

    lse = log sum_i exp(lse_i)          out = sum_i exp(lse_i - lse) * out_i

("FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving", section 2.2).
The order of the blocks does not matter.

An attention sink is one more term in every head's softmax, which has no value. A kernel that knows
no sinks gives out and lse of the keys. With a sink s of the head

    lse' = log(exp(lse) + exp(s))          out' = out / (1 + exp(s - lse))

and a block's backward from out' and lse' is that of any merged block (math.py). The factor is also
exp(lse - lse'), but lse' is rounded. The sink's own gradient is that of a key whose value is zero:
-sum over queries of exp(s - lse') * (dO . O'). ("Efficient Streaming Language Models with Attention
Sinks", section 3.)
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_prefix.device.fusion import has_triton
from megatron_prefix.device.tolerance import accumulator_dtype
from megatron_prefix.layers.blocks.interface import Partial

logger = logging.getLogger(__name__)

Merged = tuple[Tensor, Tensor]

Merge = Callable[[list[Tensor], list[Tensor], torch.dtype], Merged]
"""(outs [s, h, dv], lses [h, s], dtype of the sum) -> (out, lse)."""

MOST_PARTS = 3
"""Parts merged in one pass. The fused pass is compiled for every number of parts."""


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
    combine, dtype = implementation(outs[0].device.type), outs[0].dtype
    while len(outs) > MOST_PARTS:
        out, lse = combine(outs[:MOST_PARTS], lses[:MOST_PARTS], lses[0].dtype)
        outs, lses = [out, *outs[MOST_PARTS:]], [lse, *lses[MOST_PARTS:]]
    return combine(outs, lses, dtype)


def formula(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype) -> Merged:
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
        factor = (weight * share).transpose(0, 1).unsqueeze(-1)  # [s, h, 1]
        out = out + torch.where(factor == 0, 0.0, part.to(out.dtype) * factor)
    return out.to(dtype).contiguous(), origin + torch.log(total)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Merged:
    """out [queries, heads, dim] and lse [heads, queries] with a sink [heads]."""
    score = sink.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - score).transpose(0, 1).unsqueeze(-1)
    return (out * share).to(out.dtype), torch.logaddexp(lse, score)


def sink_gradient(out_grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Gradient of a sink, from out and lse that include it; summed in lse's dtype."""
    weight = torch.exp(sink.to(lse.dtype)[:, None] - lse)
    products = (out_grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(0, 1)
    return -(weight * products).sum(1).to(sink.dtype)


def prepare(device: torch.device, dtype: torch.dtype, heads: int, width: int) -> None:
    """Compiles every pass that `merge` can need for outputs [any, heads, width] of `dtype`.

    On CUDA only: a second or two at first, then Triton has the passes cached, also on disk.
    """
    combine, wide = implementation(device.type), accumulator_dtype(dtype)
    if combine is formula:
        return
    begin = time.perf_counter()
    # More parts than `MOST_PARTS` are merged in several passes, with a wide sum between them.
    sums = [(MOST_PARTS, dtype, wide), (MOST_PARTS, wide, wide)]
    last = [(num, first, dtype) for first in (dtype, wide) for num in range(2, MOST_PARTS + 1)]
    make = functools.partial(torch.zeros, device=device)
    for num, first, out in dict.fromkeys(last + sums):
        outs = [
            make(16, heads, width, dtype=part_dtype) for part_dtype in (first, *[dtype] * (num - 1))
        ]
        combine(outs, [make(heads, 16, dtype=wide) for _ in outs], out)
    seconds = time.perf_counter() - begin
    if seconds > 0.5:
        logger.info("the merge of attention blocks was compiled in %.1f s", seconds)


@functools.cache
def implementation(device_type: str) -> Merge:
    """`formula` on the CPU; on CUDA one pass in Triton, or `formula` where Triton does not work."""
    if not has_triton(device_type):
        return formula
    from megatron_prefix.layers.blocks.merge_triton import merge_triton

    return merge_triton
