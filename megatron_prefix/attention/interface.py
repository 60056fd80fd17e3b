"""The interface of attention kernels, and blocks as batched calls of one operator.

A kernel computes one block of a segment's attention (megatron_prefix/tree/kv_layout.py) and returns
its output and the log-sum-exp of its scores, so that blocks can be merged
(megatron_prefix/attention/merge.py). Its backward takes the *merged* output and log-sum-exp and
returns the block's part of the gradients. No dropout.

Shapes, for one segment: q [s, h, d], k [t, h_kv, d], v [t, h_kv, dv] with h a multiple of h_kv,
any strides with a contiguous last dimension; out [s, h, dv] in q's dtype; lse [h, s] in fp32 (fp64
for fp64); gradients as their inputs, dk and dv summed over the query heads of a K/V head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Aux = tuple[Any, ...]
Gradients = tuple[Tensor, Tensor, Tensor]
Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # of each span: queries and keys


class Partial(NamedTuple):
    """The result of one block: out [s, h, dv], lse [h, s], and `aux` for its backward."""

    out: Tensor
    lse: Tensor
    aux: Aux = ()


class Kernel(Protocol):
    """One way to run blocks; shapes as above.

    ``lengths`` are Python integers, the lengths of a segment's spans; they sum to s.
    """

    @property
    def name(self) -> str:
        """The name that users give."""
        ...

    def begin_step(self) -> None:
        """Called before every step; for kernels that learn from earlier shapes."""
        ...

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why this kernel cannot take these tensors; None if it can."""
        ...

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        """Every query sees every key."""
        ...

    def causal(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: tuple[int, ...]
    ) -> Partial:
        """A query sees the keys of its span up to its own position."""
        ...

    def paired(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, q_lengths: tuple[int, ...],
        k_lengths: tuple[int, ...],
    ) -> Partial:  # fmt: skip
        """A query sees every key of its span; ``k_lengths`` sum to t."""
        ...

    def dense_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        aux: Aux,
        scale: float,
    ) -> Gradients:
        """(dq, dk, dv) of a dense block from the merged ``out`` and ``lse``."""
        ...

    def causal_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        aux: Aux,
        scale: float,
        lengths: tuple[int, ...],
    ) -> Gradients:
        """(dq, dk, dv) of a causal block from the merged ``out`` and ``lse``."""
        ...

    def paired_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        scale: float, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...],
    ) -> Gradients:  # fmt: skip
        """(dq, dk, dv) of a paired block from the merged ``out`` and ``lse``."""
        ...


class Saved(NamedTuple):
    """What a backward reads, for n spans: lse [n, h, s], the others [n, positions, heads, d]."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Run(NamedTuple):
    """``num`` consecutive spans of ``length`` positions each: one batched call."""

    start: int
    num: int
    length: int

    def view(self, x: Tensor) -> Tensor:
        """[positions, heads, d] -> this run's [num, length, heads, d], a view."""
        mine = x[self.start : self.start + self.num * self.length]
        return mine.unflatten(0, (self.num, self.length))

    def view_lse(self, lse: Tensor) -> Tensor:
        """[heads, positions] -> this run's [num, heads, length], a view."""
        columns = lse[:, self.start : self.start + self.num * self.length]
        return columns.unflatten(1, (self.num, self.length)).transpose(0, 1)


@functools.lru_cache(maxsize=1024)
def runs(lengths: tuple[int, ...], padded_length: int) -> tuple[Run, ...]:
    """Consecutive spans of equal length are one run.

    Raises ValueError for an empty span, or if the lengths do not sum to ``padded_length``.
    """
    return tuple(run for run, _ in run_pairs(lengths, lengths, padded_length, padded_length))


@functools.lru_cache(maxsize=1024)
def run_pairs(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], num_queries: int, num_keys: int
) -> tuple[tuple[Run, Run], ...]:
    """Consecutive spans with equal numbers of queries and equal numbers of keys are one run.

    Raises ValueError as `runs`, and for unequal numbers of spans.
    """
    for lengths, padded_length in ((q_lengths, num_queries), (k_lengths, num_keys)):
        if min(lengths, default=0) < 1 or sum(lengths) != padded_length:
            raise ValueError(f"lengths {lengths} must be positive and sum to {padded_length}")
    found, start, key_start = [], 0, 0
    for (length, num_seen), members in groupby(zip(q_lengths, k_lengths, strict=True)):
        num = len(list(members))
        found.append((Run(start, num, length), Run(key_start, num, num_seen)))
        start, key_start = start + num * length, key_start + num * num_seen
    return tuple(found)


class Batched:
    """Blocks as batched calls of one operator on [n, positions, heads, d] tensors.

    A dense block, one long span and a wave of equal spans are one call on views. A wave of several
    runs is one call a run, joined by one copy. A subclass has a ``name``, `forward` and `backward`.
    """

    name: str

    def begin_step(self) -> None:
        """See `Kernel.begin_step`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Aux]:
        """(out [n, s, h, dv], lse [n, h, s], aux) of n spans with the same mask."""
        raise NotImplementedError

    def backward(self, saved: Saved, aux: Aux, scale: float, causal: bool) -> Gradients:
        """(dq, dk, dv), shapes as q, k, v of ``saved``, newly allocated."""
        raise NotImplementedError

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

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        """See `Kernel.dense`."""
        self.guard(q, k, v)
        out, lse, aux = self.forward(q[None], k[None], v[None], scale, causal=False)
        return Partial(out[0], lse[0], aux)

    def dense_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        aux: Aux,
        scale: float,
    ) -> Gradients:
        """See `Kernel.dense_backward`."""
        self.guard(q, k, v, dout, out)
        saved = Saved(*(x[None] for x in (dout, q, k, v, out, lse)))
        dq, dk, dv = self.backward(saved, aux, scale, causal=False)
        return dq[0], dk[0], dv[0]

    def causal(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: tuple[int, ...]
    ) -> Partial:
        """See `Kernel.causal`."""
        self.guard(q, k, v)
        return self.packed(q, k, v, scale, (lengths, lengths), causal=True)

    def causal_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        aux: Aux,
        scale: float,
        lengths: tuple[int, ...],
    ) -> Gradients:
        """See `Kernel.causal_backward`."""
        self.guard(q, k, v, dout, out)
        saved = Saved(dout, q, k, v, out, lse)
        return self.packed_backward(saved, aux, scale, (lengths, lengths), causal=True)

    def paired(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, q_lengths: tuple[int, ...],
        k_lengths: tuple[int, ...],
    ) -> Partial:  # fmt: skip
        """See `Kernel.paired`."""
        self.guard(q, k, v)
        return self.packed(q, k, v, scale, (q_lengths, k_lengths), causal=False)

    def paired_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        scale: float, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...],
    ) -> Gradients:  # fmt: skip
        """See `Kernel.paired_backward`."""
        self.guard(q, k, v, dout, out)
        saved = Saved(dout, q, k, v, out, lse)
        return self.packed_backward(saved, aux, scale, (q_lengths, k_lengths), causal=False)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: Lengths, causal: bool
    ) -> Partial:
        """Spans side by side, each with keys of its own; shapes as in `Kernel`."""
        parts = [
            self.forward(mine.view(q), seen.view(k), seen.view(v), scale, causal=causal)
            for mine, seen in run_pairs(*lengths, q.shape[0], k.shape[0])
        ]
        outs = [out.flatten(0, 1) for out, _, _ in parts]
        lses = [lse.transpose(0, 1).flatten(1, 2) for _, lse, _ in parts]
        return Partial(joined(outs), joined(lses, dim=1), tuple(aux for _, _, aux in parts))

    def packed_backward(
        self, saved: Saved, aux: Aux, scale: float, lengths: Lengths, causal: bool
    ) -> Gradients:
        """The gradients of `packed`; ``saved`` has no leading dimension."""
        dout, q, k, v, out, lse = saved
        shares = []
        pairs = run_pairs(*lengths, q.shape[0], k.shape[0])
        for (mine, seen), run_aux in zip(pairs, aux, strict=True):
            batch = Saved(
                mine.view(dout), mine.view(q), seen.view(k), seen.view(v), mine.view(out),
                mine.view_lse(lse),
            )  # fmt: skip
            shares.append(self.backward(batch, run_aux, scale, causal=causal))
        dq, dk, dv = (
            joined([gradient.flatten(0, 1) for gradient in gradients])
            for gradients in zip(*shares, strict=True)
        )
        return dq, dk, dv


def joined(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The pieces concatenated; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)
