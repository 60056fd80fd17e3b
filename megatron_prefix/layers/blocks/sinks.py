"""Attention sinks: one more term in every head's softmax, which has no value.

A kernel that knows no sinks gives out and lse of the keys. With a sink s of the head

    lse' = log(exp(lse) + exp(s))          out' = exp(lse - lse') * out

and a block's backward from out' and lse' is that of any merged block (math.py). The sink's own
gradient is that of a key whose value is zero: -sum over queries of exp(s - lse') * (dO . O').
("Efficient Streaming Language Models with Attention Sinks", section 3.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """out [queries, heads, dim] and lse [heads, queries] with a sink [heads]; None: as they are."""
    if sink is None:
        return out, lse
    total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    share = torch.exp(lse - total).transpose(0, 1).unsqueeze(-1)
    return (out * share).to(out.dtype), total


def sink_gradient(out_grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor | None:
    """Of a sink, from out and lse with it; summed in lse's dtype. None without a sink."""
    if sink is None:
        return None
    weight = torch.exp(sink.to(lse.dtype)[:, None] - lse)
    products = (out_grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(0, 1)
    return -(weight * products).sum(1).to(sink.dtype)
