"""Attention whose runs have their lengths on the device: a graph reads them in every replay."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.tolerance import accumulator_dtype
from megatron_prefix.layers.blocks.batched import Saved
from megatron_prefix.layers.blocks.interface import Aux, Gradients, Kernel, Partial
from megatron_prefix.layers.blocks.operators import FA4_RUNS, FA4_SHORT
from megatron_prefix.layers.kind import Running


def most_runs(kernel: Kernel, device: torch.device) -> int:
    """How many placed runs a kernel takes in a call; 0: none. The formulas hold all scores at once,
    so they are for the CPU, on which no graph is but a test's."""
    if kernel.name == "math":
        return sys.maxsize if device.type == "cpu" else 0
    return FA4_RUNS if kernel.name == "fa4" else 0


def placed_runs(running: Running, device: torch.device) -> int:
    """How many all kernels of a model chunk take."""
    return min(most_runs(kernel, device) for kernel in running.kernels.values())


class PlacedRuns(NamedTuple):
    """As `Runs`, on the device. Runs may be empty, and so may their keys; keys behind those of the
    last run are nobody's.

    Attributes:
        queries, keys: first of each run and the end, int32 [runs + 1].
        most_queries, most_keys: bounds on a run's.
    """

    queries: Tensor
    keys: Tensor
    causal: bool
    most_queries: int
    most_keys: int

    @property
    def lengths(self) -> dict[str, Any]:
        """Of a varlen call; its bounds are never short (see `Fa4Kernel`)."""
        return {
            "cu_seqlens_q": self.queries,
            "cu_seqlens_k": self.keys,
            "max_seqlen_q": max(self.most_queries, FA4_SHORT + 1),
            "max_seqlen_k": max(self.most_keys, FA4_SHORT + 1),
        }


def starts_of(lengths: Sequence[int], most: int) -> np.ndarray:
    """Of runs of these lengths the first of each, with empty ones up to `most`, and the end."""
    ends = np.zeros(most + 1, dtype=np.int64)
    ends[1 : len(lengths) + 1] = lengths
    return np.cumsum(ends)


class PlacedKernel(Kernel):
    """One of these kernels, with `PlacedRuns`. Queries of runs without keys have 0 and a
    log-sum-exp of -inf; gradients of keys that are nobody's are 0. Those of a segment are in
    runs."""

    def __init__(self, kernel: Any) -> None:
        self.name, self._kernel = kernel.name, kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Any, scale: float) -> Partial:
        """See Kernel."""
        if self.name == "math":
            return _forward(q, k, v, runs, scale, self._kernel.window)
        return Partial(*self._kernel.attend(q, k, v, scale, runs.causal, **runs.lengths))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        runs: Any, scale: float,
    ) -> Gradients:  # fmt: skip
        """See Kernel."""
        saved = Saved(dout, q, k, v, out, lse)
        gradients: Gradients
        if self.name == "math":
            gradients = _backward(saved, runs, scale, self._kernel.window)
        else:
            gradients = self._kernel.attend_backward(saved, aux, scale, runs.causal, **runs.lengths)
        if runs.keys is not runs.queries:
            # Kernels leave anything there, perhaps NaN: of latents it would go into weights.
            nobody = torch.arange(len(k), device=k.device) >= runs.keys[-1]
            for gradient in gradients[1:]:
                gradient.masked_fill_(nobody[:, None, None], 0.0)
        return gradients


def _forward(
    q: Tensor, k: Tensor, v: Tensor, runs: PlacedRuns, scale: float, window: int | None
) -> Partial:  # fmt: skip
    """The formulas of layers/blocks/math.py, without a word from the host."""
    scores = _scores(q, k, runs, scale, window)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
    out = torch.einsum("hgst,thd->shgd", weights, v.to(scores.dtype)).flatten(1, 2)
    return Partial(out.to(q.dtype), lse.flatten(0, 1))


def _backward(saved: Saved, runs: PlacedRuns, scale: float, window: int | None) -> Gradients:
    dout, q, k, v, out, lse = saved
    scores = _scores(q, k, runs, scale, window)
    wide, heads = scores.dtype, k.shape[1]
    p = torch.exp(scores - lse.to(wide).unflatten(0, (heads, -1)).unsqueeze(-1))
    do, outs, queries = (x.to(wide).unflatten(1, (heads, -1)) for x in (dout, out, q))
    d = (do * outs).sum(-1).permute(1, 2, 0).unsqueeze(-1)
    ds = (torch.einsum("shgd,thd->hgst", do, v.to(wide)) - d) * p * scale
    dq = torch.einsum("hgst,thd->shgd", ds, k.to(wide)).flatten(1, 2)
    dk = torch.einsum("hgst,shgd->thd", ds, queries)
    dv = torch.einsum("hgst,shgd->thd", p, do)
    # As flash-attn-4, which leaves what was in memory there.
    nobody = _numbers(runs.keys, k)[0][:, None, None] == len(runs.keys) - 1
    dk, dv = (x.masked_fill(nobody, torch.nan) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(
    q: Tensor, k: Tensor, runs: PlacedRuns, scale: float, window: int | None
) -> Tensor:  # fmt: skip
    """Scaled scores [kv_heads, group, queries, keys]; -inf where a key is not seen. The last query
    of a causal run sees its last key."""
    wide = accumulator_dtype(q.dtype)
    queries = q.to(wide).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("shgd,thd->hgst", queries, k.to(wide)) * scale
    number, place = _numbers(runs.queries, q)
    key_number, key_place = _numbers(runs.keys, k)
    hidden = number[:, None] != key_number
    if runs.causal:
        before = (runs.keys.diff() - runs.queries.diff())[number]
        behind = key_place - (place + before)[:, None]
        hidden |= behind > 0
        if window is not None:
            hidden |= behind < -window
    return scores.masked_fill(hidden, float("-inf"))


def _numbers(starts: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each position its run, and its place in that."""
    positions = torch.arange(len(x), dtype=torch.int32, device=x.device)
    number = torch.searchsorted(starts, positions, right=True) - 1
    return number, positions - starts[number]
