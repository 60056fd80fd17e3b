"""Peers that run a packed group as one function by autograd: K/V repeated, PrefixGrouper."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.peers_attention import Inputs, Results, forget, gradients_of, side_by_side
from megatron_prefix.layers.blocks.batched import Saved

Attend = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
Causal = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [n, s, h, d], k, v [n, t, h_kv, d] -> [n, s, h, d]; the last query sees all t keys."""


class Graph:
    """Any function of the packed group, by autograd.

    Args:
        inputs: the group.
        sizes: positions of the parts that queries, keys and values come in.
        attend: from the parts of each to the parts of the output.
    """

    def __init__(self, inputs: Inputs, sizes: Sequence[int], attend: Attend) -> None:
        self._attend = attend
        self._leaves = [
            [part.detach().requires_grad_() for part in x.split(list(sizes))]
            for x in (inputs.q, inputs.k, inputs.v)
        ]
        self._dout = inputs.dout.split(list(sizes))
        self._outputs: Sequence[Tensor] = ()

    def forward(self) -> None:
        """See `Peer.forward`."""
        forget(self._leaves)
        self._outputs = ()
        self._outputs = self._attend(*self._leaves)

    def backward(self) -> None:
        """See `Peer.backward`."""
        torch.autograd.backward(list(self._outputs), list(self._dout))

    def results(self) -> Results:
        """See `Peer.results`."""
        outs = [out.detach() for out in self._outputs]
        return Results(torch.cat(outs), *gradients_of(self._leaves))


def repeated(inputs: Inputs, causal: Causal) -> Graph:
    """The prompt once; each answer's queries see a copy of its K/V and the answer's own."""
    shape = inputs.shape

    def attend(q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]) -> list[Tensor]:
        prompt = causal(q[0][None], k[0][None], v[0][None])
        answers = q[1].unflatten(0, (shape.num, shape.response))
        keys, values = (torch.cat(side_by_side(x[0], x[1], shape), 1) for x in (k, v))
        return [prompt[0], causal(answers, keys, values).flatten(0, 1)]

    return Graph(inputs, (shape.prefix, shape.rows), attend)


def grouper(inputs: Inputs, causal: Causal) -> Graph:
    """PrefixGrouper, of the package `prefix-grouper` (MIT licence), called as its README says.

    Raises ImportError without the package.
    """
    made = importlib.import_module("prefix_grouper").PrefixGrouper(
        group_info=[[inputs.shape.prefix, *[inputs.shape.response] * inputs.shape.num]],
        device=inputs.q.device,
    )

    def one_call(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        # It has [n, heads, positions, dim] and wants [n, positions, heads, dim]. Its last argument
        # is the mask of padding, which answers of equal length have none of.
        return causal(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    def attend(q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]) -> list[Tensor]:
        heads = (x[0].transpose(0, 1)[None] for x in (q, k, v))
        return [made.forward(one_call, *heads)[0]]

    return Graph(inputs, (len(inputs.q),), attend)


def causal_by(kernel: Any, scale: float) -> Causal:
    """Causal attention with more keys than queries by a kernel of this package."""
    return lambda q, k, v: _Causal.apply(q, k, v, kernel, scale)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Any, scale: float) -> Tensor:  # type: ignore[override]
        out, lse, ctx.aux = kernel.block(q, k, v, scale, True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        kernel, scale = ctx.call
        saved = Saved(dout.contiguous(), *ctx.saved_tensors)
        return *kernel.block_backward(saved, ctx.aux, scale, True), None, None
