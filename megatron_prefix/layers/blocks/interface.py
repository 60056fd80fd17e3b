"""The interface of attention kernels, and blocks as batched calls of one operator.

A kernel computes one block of a segment's attention (tree/payload_map.py) and returns its output
and the log-sum-exp of its scores, so that blocks can be merged (merge.py). Its backward takes the
*merged* output and log-sum-exp and returns the block's part of the gradients. No dropout.

Shapes, for one segment: q [s, h, d], k [t, h_kv, d], v [t, h_kv, dv] with h a multiple of h_kv,
any strides with a contiguous last dimension; out [s, h, dv] in q's dtype; lse [h, s] in fp32 (fp64
for fp64); gradients as their inputs, dk and dv summed over the query heads of a K/V head.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Aux = tuple[Any, ...]
Gradients = tuple[Tensor, Tensor, Tensor]


class Partial(NamedTuple):
    """The result of one block: out [s, h, dv], lse [h, s], and `aux` for its backward."""

    out: Tensor
    lse: Tensor
    aux: Aux = ()


@dataclass(frozen=True)
class Runs:
    """Which keys the queries of a block see.

    The block is a list of runs: consecutive queries that see the same consecutive keys. The keys of
    the runs lie one after another, without gaps, in the order of the runs.

    Attributes:
        queries: queries of each run, at least one; they sum to s.
        keys: keys of each run, at least one; they sum to t.
        causal: whether query i of a run with s queries and t >= s keys sees the first t - s + i + 1
            of them (the last query all), or every query all keys of its run.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.queries, self.keys, self.causal))

    def __hash__(self) -> int:
        """Computed once: layers look up by it what a kernel's call needs."""
        return self._hash

    @classmethod
    def dense(cls, num_queries: int, num_keys: int) -> Runs:
        """Every query sees every key."""
        return cls((num_queries,), (num_keys,))

    @classmethod
    def own(cls, lengths: tuple[int, ...]) -> Runs:
        """Spans of these lengths, each of which sees itself causally."""
        return cls(lengths, lengths, causal=True)


class Kernel(Protocol):
    """One way to run blocks; shapes as above."""

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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Partial:
        """The block's result.

        Raises:
            ValueError: ``runs`` do not fit the tensors.
            UserError: the operator would fault on these tensors.
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        runs: Runs, scale: float,
    ) -> Gradients:  # fmt: skip
        """(dq, dk, dv) of the block from the merged ``out`` and ``lse``; ``aux`` is the forward's.

        Raises as `forward`. The gradients are newly allocated.
        """
        ...


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
        return mine.unflatten(0, (self.num, self.length))

    def view_lse(self, lse: Tensor) -> Tensor:
        """[heads, positions] -> this batch's [num, heads, length], a view."""
        columns = lse[:, self.start : self.start + self.num * self.length]
        return columns.unflatten(1, (self.num, self.length)).transpose(0, 1)


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
    found, start, key_start = [], 0, 0
    for (length, num_seen), members in groupby(zip(runs.queries, runs.keys, strict=True)):
        num = len(list(members))
        found.append((Batch(start, num, length), Batch(key_start, num, num_seen)))
        start, key_start = start + num * length, key_start + num * num_seen
    return tuple(found)


class Batched:
    """Blocks as batched calls of one operator on [n, positions, heads, d] tensors.

    A single run and equal runs are one call on views. Unequal runs are one call a batch, joined by
    one copy. A subclass has a ``name``, `attend` and `attend_backward`.
    """

    name: str

    def begin_step(self) -> None:
        """See `Kernel.begin_step`."""

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
        found = batches(runs, q.shape[0], k.shape[0])
        for (mine, seen), batch_aux in zip(found, aux, strict=True):
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


def joined(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The pieces concatenated; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)
