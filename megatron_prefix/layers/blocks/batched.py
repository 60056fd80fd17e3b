"""Blocks as batched calls of one operator on [n, positions, heads, d] tensors.

Where the mask of an operator begins with the first key, a causal run with more keys than queries is
two blocks: every query sees the keys before the last ones, and the last ones, as many as there are
queries, causally.
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
    """What a backward reads, for n runs: lse [n, h, s], the others [n, positions, heads, d]."""

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
        mine = x[self.start : self.start + self.num * self.length]
        return mine.view(self.num, self.length, *x.shape[1:])  # torch's unflatten is in Python

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
        window: of causal runs a query sees its own key and so many before it; None: all.
        has_windows: whether `attend` follows it.
    """

    window: int | None = None
    has_windows = False

    def windowed(self, window: int) -> Batched | None:
        """The same kernel with a window; None if it has none."""
        if not self.has_windows:
            return None
        found = copy.copy(self)
        found.window = window
        return found

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
        """As `attend`; by several calls where the operator has no such mask."""
        return self.attend(q, k, v, scale, causal)

    def block_backward(self, saved: Saved, aux: Aux, scale: float, causal: bool) -> Gradients:
        """As `attend_backward`, of what `block` did."""
        return self.attend_backward(saved, aux, scale, causal)

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """See `Kernel.refusal`; a subclass adds what its operator cannot take."""
        t, h_kv, d = k.shape
        if q.shape[2] != d or v.shape[:2] != (t, h_kv) or q.shape[1] % h_kv:
            shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            return f"{shapes} are not [s, h, d], [t, h_kv, d], [t, h_kv, dv]"
        if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
            return f"needs one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            return "needs a contiguous last dimension of q, k and v"
        return None

    def guard(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> None:
        """Raise for tensors on which the operator would fault; called before every call.

        It reads host integers only, so it never waits for the device.

        Args:
            q, k, v: what every call reads.
            more: dout and out of a backward.
        """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Partial:
        """See `Kernel.forward`."""
        self.guard(q, k, v)
        parts = [
            self.block(mine.view(q), seen.view(k), seen.view(v), scale, runs.causal)
            for mine, seen in batches(runs, q.shape[0], k.shape[0])
        ]
        outs = [out.flatten(0, 1) for out, _, _ in parts]
        lses = [lse.transpose(0, 1).flatten(1, 2) for _, lse, _ in parts]
        return Partial(joined(outs), joined(lses, dim=1), tuple(aux for _, _, aux in parts))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        runs: Runs, scale: float,
    ) -> Gradients:  # fmt: skip
        """See `Kernel.backward`."""
        self.guard(q, k, v, dout, out)
        shares = []
        calls = batches(runs, q.shape[0], k.shape[0])
        for (mine, seen), batch_aux in zip(calls, aux, strict=True):
            saved = Saved(
                mine.view(dout), mine.view(q), seen.view(k), seen.view(v), mine.view(out),
                mine.view_lse(lse),
            )  # fmt: skip
            shares.append(self.block_backward(saved, batch_aux, scale, runs.causal))
        dq, dk, dv = (
            joined([gradient.flatten(0, 1) for gradient in gradients])
            for gradients in zip(*shares, strict=True)
        )
        return dq, dk, dv


class SplitCausal(Batched):
    """Batched calls of an operator that takes causal runs with as many keys as queries only."""

    def block(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Aux]:
        """See `Batched.block`."""
        more = k.shape[1] - q.shape[1]
        if not (causal and more):
            return self.attend(q, k, v, scale, causal)
        early = self.attend(q, k[:, :more], v[:, :more], scale, False)
        late = self.attend(q, k[:, more:], v[:, more:], scale, True)
        parts = [
            Partial(out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
            for out, lse, _ in (early, late)
        ]
        out, lse = merge(parts)
        num = (q.shape[0], q.shape[1])
        return out.unflatten(0, num), lse.unflatten(1, num).transpose(0, 1), (early[2], late[2])

    def block_backward(self, saved: Saved, aux: Aux, scale: float, causal: bool) -> Gradients:
        """See `Batched.block_backward`."""
        more = saved.k.shape[1] - saved.q.shape[1]
        if not (causal and more):
            return self.attend_backward(saved, aux, scale, causal)
        shares = []
        for keys, part_aux, masked in (
            (slice(None, more), aux[0], False), (slice(more, None), aux[1], True),
        ):  # fmt: skip
            part = saved._replace(k=saved.k[:, keys], v=saved.v[:, keys])
            shares.append(self.attend_backward(part, part_aux, scale, masked))
        (dq, *early), (more_dq, *late) = shares
        dk, dv = (joined(pair, dim=1) for pair in zip(early, late, strict=True))
        return dq + more_dq, dk, dv


def joined(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The pieces concatenated; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)
