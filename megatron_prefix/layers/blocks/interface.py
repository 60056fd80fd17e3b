"""The interface of attention kernels.

A kernel computes one block of a segment's attention (tree/payload_map.py) and returns its output
and the log-sum-exp of its scores, so that blocks can be merged (merge.py). Its backward takes the
*merged* output and log-sum-exp and returns the block's part of the gradients. No dropout.

Shapes, for one segment: q [s, h, d], k [t, h_kv, d], v [t, h_kv, dv] with h a multiple of h_kv,
any strides with a contiguous last dimension; out [s, h, dv] in q's dtype; lse [h, s] in fp32 (fp64
for fp64); gradients as their inputs, dk and dv summed over the query heads of a K/V head.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        return cls((num_queries,), (num_keys,))

    @classmethod
    def own(cls, lengths: tuple[int, ...]) -> Runs:
        return cls(lengths, lengths, causal=True)


class Kernel:
    """One way to run blocks; shapes as above.

    Attributes:
        takes_fronts: whether causal runs with more keys than queries take no more calls than other
            runs.
    """

    name: str
    takes_fronts = False

    def begin_step(self) -> None:
        """Called before every step; for kernels that learn from earlier shapes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Partial:
        """The block's result.

        Raises:
            ValueError: ``runs`` do not fit the tensors.
            UserError: the operator would fault on these tensors.
        """
        raise NotImplementedError

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        runs: Runs, scale: float,
    ) -> Gradients:  # fmt: skip
        """(dq, dk, dv) of the block from the merged ``out`` and ``lse``; ``aux`` is the forward's.

        Raises as `forward`. The gradients are newly allocated.
        """
        raise NotImplementedError
