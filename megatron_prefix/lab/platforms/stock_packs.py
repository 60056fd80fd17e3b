"""Whether the stock schedule's attention of packs is right on a machine: found by running it.

Segments do not use it, but stock steps do, and mode "auto" takes these if sharing does not pay.
With transformer-engine 2.11 on Hopper its gradients are wrong at head width 256
(benchmarks/LOG.md), without an error.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.device import tolerance
from megatron_prefix.errors import named

LENGTHS = (1000, 300, 77, 1179)


@functools.cache
def refusal(heads: int, kv_heads: int, width: int, device: str = "cuda") -> str | None:
    """What is wrong with transformer-engine's attention of packs in bf16; None if nothing is,
    or it is not installed.

    Args:
        heads, kv_heads: of queries, and of keys and values.
        width: of a head.
        device: where to run it.
    """
    try:
        library = importlib.import_module("transformer_engine.pytorch")
    except Exception:  # noqa: BLE001  # a broken installation raises anything
        return None
    draw = torch.Generator().manual_seed(5)
    total = sum(LENGTHS)
    parts, sent = [], torch.randn(total, heads * width, generator=draw)
    for number in (heads, kv_heads, kv_heads):
        parts.append(torch.randn(total, number, width, generator=draw).to(device, torch.bfloat16))
    try:
        stock = library.DotProductAttention(heads, width, num_gqa_groups=kv_heads)
        got = _with_gradients(functools.partial(_stock, stock), parts, sent)
    except Exception as raised:  # noqa: BLE001  # a kernel fails in its own way
        return named(raised)
    wanted = _with_gradients(_definition, [part.float() for part in parts], sent)
    limit = tolerance.tolerance(torch.bfloat16, max(LENGTHS), width, 1)
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    for name, one, right in zip(names, got, wanted, strict=True):
        try:
            error = tolerance.relative_error(one, right)
        except ValueError as problem:
            return f"wrong {name} ({problem})"
        if not error <= limit:
            return f"wrong {name} (relative error {error:.1e})"
    return None


def _with_gradients(attention: Any, parts: list[Tensor], sent: Tensor) -> list[Tensor]:
    leaves = [part.requires_grad_() for part in parts]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, sent.to(out))]


def _stock(attention: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As Megatron calls it."""
    ends = [0, *itertools.accumulate(LENGTHS)]
    cumulated = torch.tensor(ends, dtype=torch.int32, device=query.device)
    out: Tensor = attention(
        query, key, value, qkv_format="thd", attn_mask_type="padding_causal",
        cu_seqlens_q=cumulated, cu_seqlens_kv=cumulated,
        max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS),
    )  # fmt: skip
    return out


def _definition(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    packs = zip(*(x.transpose(0, 1).split(LENGTHS, 1) for x in (query, key, value)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    out = [attend(q[None], k[None], v[None], is_causal=True)[0] for q, k, v in packs]
    return torch.cat(out, 1).transpose(0, 1).flatten(1)
