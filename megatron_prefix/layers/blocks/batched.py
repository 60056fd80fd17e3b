"""Blocks as batched calls of one operator on [n, positions, heads, d] tensors.

For an operator whose causal mask is aligned at the top left, a causal run with more keys than
queries is two blocks: a dense one over the first keys, and a causal square over the last.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_prefix.layers.blocks.interface import Aux, Gradients, Kernel, Partial, Runs
from megatron_prefix.layers.blocks.merge import merge


class Saved(NamedTuple):
    """Inputs of a backward of n runs: lse [n, h, s], the others [n, positions, heads, d]."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Batch(NamedTuple):
    """``num`` consecutive runs of ``length`` positions each: one batched call."""

    start: int
    num: int
    length: int

    def view(self, x: Tensor) -> Tensor:
        """[positions, heads, d] -> this batch's [num, length, heads, d], a view."""
        rows = x[self.start : self.start + self.num * self.length]
        return rows.view(self.num, self.length, *x.shape[1:])  # torch's unflatten is in Python

    def view_lse(self, lse: Tensor) -> Tensor:
        """[heads, positions] -> this batch's [num, heads, length], a view."""
        columns = lse[:, self.start : self.start + self.num * self.length]
        return columns.view(len(lse), self.num, self.length).transpose(0, 1)


@functools.lru_cache(maxsize=1024)
def batches(runs: Runs, num_queries: int, num_keys: int) -> tuple[tuple[Batch, Batch], ...]:
    """Consecutive runs of equal shape are one batch; its queries and its keys.

    Raises ValueError if a run is empty, the runs do not sum to ``num_queries`` and ``num_keys``, or
    a causal run has fewer keys than queries.
    """
    for lengths, total in ((runs.queries, num_queries), (runs.keys, num_keys)):
        if min(lengths, default=0) < 1 or sum(lengths) != total:
            raise ValueError(f"lengths {lengths} must be positive and sum to {total}")
    if runs.causal and any(map(operator.lt, runs.keys, runs.queries)):
        raise ValueError(f"causal runs of {runs.queries} queries cannot have {runs.keys} keys")
    pairs, start, key_start = [], 0, 0
    for (length, num_seen), members in groupby(zip(runs.queries, runs.keys, strict=True)):
        num = len(list(members))
        pairs.append((Batch(start, num, length), Batch(key_start, num, num_seen)))
        start, key_start = start + num * length, key_start + num * num_seen
    return tuple(pairs)


class Batched(Kernel):
    """Blocks as batched calls of one operator on [n, positions, heads, d] tensors.

    A single run and equal runs are one call on views. Unequal runs are one call a batch, joined by
    one copy. A subclass has a ``name``, `attend` and `attend_backward`.

    Attributes:
        window: of causal runs a query sees its own key and `window` before it; None: all.
        has_windows: whether `attend` supports it.
    """

    window: int | None = None
    has_windows = False

    def windowed(self, window: int) -> Batched | None:
        if not self.has_windows:
            return None
        kernel = copy.copy(self)
        kernel.window = window
        return kernel

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Aux]:
        """(out [n, s, h, dv], lse [n, h, s], aux) of n runs of the same shape, by one call."""
        raise NotImplementedError

    def attend_backward(self, saved: Saved, aux: Aux, scale: float, causal: bool) -> Gradients:
        """(dq, dk, dv), shapes as q, k, v of ``saved``, newly allocated."""
        raise NotImplementedError

    def block(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Aux]:
        """As `attend`, in several calls where the operator lacks the mask."""
        return self.attend(q, k, v, scale, causal)

    def block_backward(self, saved: Saved, aux: Aux, scale: float, causal: bool) -> Gradients:
        return self.attend_backward(saved, aux, scale, causal)

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why this kernel cannot take these tensors; None if it can. Subclasses add to it what
        their operator cannot take."""
        t, h_kv, d = k.shape
        if q.shape[2] != d or v.shape[:2] != (t, h_kv) or q.shape[1] % h_kv:
            shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            return f"{shapes} are not [s, h, d], [t, h_kv, d], [t, h_kv, dv]"
        if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
            return f"needs one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            return "needs a contiguous last dimension of q, k and v"
        return None

    def guard(self, q: Tensor, k: Tensor, v: Tensor, *backward_inputs: Tensor) -> None:
        """Raises for tensors on which the operator would fault, before every call; it reads host
        integers only, so it never waits for the device. `backward_inputs`: dout and out."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Partial:
        self.guard(q, k, v)
        parts = [
            self.block(
                query_batch.view(q), key_batch.view(k), key_batch.view(v), scale, runs.causal
            )
            for query_batch, key_batch in batches(runs, q.shape[0], k.shape[0])
        ]
        outs = [out.flatten(0, 1) for out, _, _ in parts]
        lses = [lse.transpose(0, 1).flatten(1, 2) for _, lse, _ in parts]
        return Partial(joined(outs), joined(lses, dim=1), tuple(aux for _, _, aux in parts))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        runs: Runs, scale: float,
    ) -> Gradients:  # fmt: skip
        self.guard(q, k, v, dout, out)
        shares = []
        calls = batches(runs, q.shape[0], k.shape[0])
        for (query_batch, key_batch), batch_aux in zip(calls, aux, strict=True):
            saved = Saved(
                query_batch.view(dout), query_batch.view(q), key_batch.view(k), key_batch.view(v),
                query_batch.view(out), query_batch.view_lse(lse),
            )  # fmt: skip
            shares.append(self.block_backward(saved, batch_aux, scale, runs.causal))
        dq, dk, dv = (
            joined([gradient.flatten(0, 1) for gradient in gradients])
            for gradients in zip(*shares, strict=True)
        )
        return dq, dk, dv


class SplitCausal(Batched):
    """Batched calls of an operator whose causal runs need as many keys as queries."""

    def block(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Aux]:
        num_early = k.shape[1] - q.shape[1]
        if not (causal and num_early):
            return self.attend(q, k, v, scale, causal)
        early = self.attend(q, k[:, :num_early], v[:, :num_early], scale, False)
        late = self.attend(q, k[:, num_early:], v[:, num_early:], scale, True)
        parts = [
            Partial(out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
            for out, lse, _ in (early, late)
        ]
        out, lse = merge(parts)
        num = (q.shape[0], q.shape[1])
        return out.unflatten(0, num), lse.unflatten(1, num).transpose(0, 1), (early[2], late[2])

    def block_backward(self, saved: Saved, aux: Aux, scale: float, causal: bool) -> Gradients:
        num_early = saved.k.shape[1] - saved.q.shape[1]
        if not (causal and num_early):
            return self.attend_backward(saved, aux, scale, causal)
        shares = []
        for keys, part_aux, masked in (
            (slice(None, num_early), aux[0], False), (slice(num_early, None), aux[1], True),
        ):  # fmt: skip
            part = saved._replace(k=saved.k[:, keys], v=saved.v[:, keys])
            shares.append(self.attend_backward(part, part_aux, scale, masked))
        (dq, *early), (more_dq, *late) = shares
        dk, dv = (joined(pair, dim=1) for pair in zip(early, late, strict=True))
        return dq + more_dq, dk, dv


def joined(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The pieces concatenated; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)
