"""What an attention kernel is, and how blocks become batched calls of one operator.

A kernel computes one block of a segment's attention (megatron_prefix/tree/kv_layout.py) and
returns its output with the log-sum-exp of its scores, so that blocks can be merged
(megatron_prefix/attention/merge.py). Its backward takes the *merged* output and log-sum-exp and
returns the block's share of the gradients. No dropout.

Shapes, for one packed row: q [s, h, d], k [t, h_kv, d], v [t, h_kv, dv] with h a multiple of h_kv,
any strides with a contiguous last dimension; out [s, h, dv] in q's dtype; lse [h, s] in fp32 (fp64
for fp64); gradients as their inputs, dk and dv summed over the query heads of a K/V head.
"""

# long: one contract and the class that keeps it for every operator
from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Aux = tuple[Any, ...]
Gradients = tuple[Tensor, Tensor, Tensor]
Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # of each rollout's queries and keys


class Partial(NamedTuple):
    """What one block contributes: out [s, h, dv], lse [h, s], and what its backward wants back."""

    out: Tensor
    lse: Tensor
    aux: Aux = ()


class Kernel(Protocol):
    """One way to run blocks; shapes as above.

    ``lengths`` are host integers, the rows of the consecutive rollouts of a wave; they sum to s.
    """

    @property
    def name(self) -> str:
        """What the user calls it."""
        ...

    def begin_step(self) -> None:
        """Told once before every step; for kernels that learn from what they have met."""
        ...

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why this kernel cannot take these tensors, None if it can."""
        ...

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        """Every query row sees every key row."""
        ...

    def causal(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: tuple[int, ...]
    ) -> Partial:
        """A row of a rollout sees that rollout's rows up to itself."""
        ...

    def paired(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, q_lengths: tuple[int, ...],
        k_lengths: tuple[int, ...],
    ) -> Partial:  # fmt: skip
        """A row of a rollout sees every key of that rollout; ``k_lengths`` sum to t."""
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
    """What a backward reads, for n rows at once: lse [n, h, s], the others [n, rows, heads, d]."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Run(NamedTuple):
    """``num`` consecutive rollouts of ``length`` rows each: one batched call."""

    start: int
    num: int
    length: int

    def view(self, x: Tensor) -> Tensor:
        """[rows, heads, d] -> this run's [num, length, heads, d], a view."""
        rows = x[self.start : self.start + self.num * self.length]
        return rows.unflatten(0, (self.num, self.length))

    def view_lse(self, lse: Tensor) -> Tensor:
        """[heads, rows] -> this run's [num, heads, length], a view."""
        columns = lse[:, self.start : self.start + self.num * self.length]
        return columns.unflatten(1, (self.num, self.length)).transpose(0, 1)


@functools.lru_cache(maxsize=1024)
def runs(lengths: tuple[int, ...], padded_length: int) -> tuple[Run, ...]:
    """Rollouts of equal length side by side are one run.

    Raises ValueError for a rollout without rows, or if the lengths do not sum to ``padded_length``.
    """
    return tuple(run for run, _ in run_pairs(lengths, lengths, padded_length, padded_length))


@functools.lru_cache(maxsize=1024)
def run_pairs(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], num_queries: int, num_keys: int
) -> tuple[tuple[Run, Run], ...]:
    """Rollouts with equally many queries and equally many keys side by side are one run of each.

    Raises ValueError as `runs`, and for unequal numbers of rollouts.
    """
    for lengths, padded_length in ((q_lengths, num_queries), (k_lengths, num_keys)):
        if min(lengths, default=0) < 1 or sum(lengths) != padded_length:
            raise ValueError(f"lengths {lengths} must be positive and sum to {padded_length} rows")
    found, start, key_start = [], 0, 0
    for (length, num_seen), members in groupby(zip(q_lengths, k_lengths, strict=True)):
        num = len(list(members))
        found.append((Run(start, num, length), Run(key_start, num, num_seen)))
        start, key_start = start + num * length, key_start + num * num_seen
    return tuple(found)


class Batched:
    """Blocks as batched calls of one operator on [n, rows, heads, d] tensors.

    A dense block, one long rollout and a wave of equal rollouts are one call on views; a wave of
    several runs is one call a run, joined in one copy. A subclass has a ``name``, `forward` and
    `backward`.
    """

    name: str

    def begin_step(self) -> None:
        """See `Kernel.begin_step`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Aux]:
        """(out [n, s, h, dv], lse [n, h, s], aux) of n rows with the same mask."""
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

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        """See `Kernel.dense`."""
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
        saved = Saved(*(x[None] for x in (dout, q, k, v, out, lse)))
        dq, dk, dv = self.backward(saved, aux, scale, causal=False)
        return dq[0], dk[0], dv[0]

    def causal(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: tuple[int, ...]
    ) -> Partial:
        """See `Kernel.causal`."""
        return self.rows(q, k, v, scale, (lengths, lengths), causal=True)

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
        saved = Saved(dout, q, k, v, out, lse)
        return self.rows_backward(saved, aux, scale, (lengths, lengths), causal=True)

    def paired(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, q_lengths: tuple[int, ...],
        k_lengths: tuple[int, ...],
    ) -> Partial:  # fmt: skip
        """See `Kernel.paired`."""
        return self.rows(q, k, v, scale, (q_lengths, k_lengths), causal=False)

    def paired_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        scale: float, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...],
    ) -> Gradients:  # fmt: skip
        """See `Kernel.paired_backward`."""
        saved = Saved(dout, q, k, v, out, lse)
        return self.rows_backward(saved, aux, scale, (q_lengths, k_lengths), causal=False)

    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: Lengths, causal: bool
    ) -> Partial:
        """Rollouts side by side, each with keys of its own; shapes as in `Kernel`."""
        parts = [
            self.forward(mine.view(q), seen.view(k), seen.view(v), scale, causal=causal)
            for mine, seen in run_pairs(*lengths, q.shape[0], k.shape[0])
        ]
        outs = [out.flatten(0, 1) for out, _, _ in parts]
        lses = [lse.transpose(0, 1).flatten(1, 2) for _, lse, _ in parts]
        return Partial(joined(outs), joined(lses, dim=1), tuple(aux for _, _, aux in parts))

    def rows_backward(
        self, saved: Saved, aux: Aux, scale: float, lengths: Lengths, causal: bool
    ) -> Gradients:
        """The gradients of `rows`; ``saved`` holds the rows without a leading dimension."""
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
    """The pieces side by side; a single piece as it is, without a copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)
