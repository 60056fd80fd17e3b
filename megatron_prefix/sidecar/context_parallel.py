"""Context parallelism: ranks exchange K/V before attention, and gK/gV after it.

Every span of a segment is cut zig-zag (megatron_prefix/tree/cp_layout.py). Queries stay on their
rank. Ranks exchange K/V in the forward, gK/gV in the backward and, on the last stage, the outputs
of scored segments, one number a token.

A segment's own K/V are gathered in one call, in the forward and, if no rank keeps them, again in
the backward; their gradients are summed and reduced in fp32 or wider. ("The Llama 3 Herd of
Models", section 3.3.2, gathers in the same way.) Of inner segments every rank keeps its own
positions (sidecar/sharded.py) or all of them (sidecar/gathered.py).

Collectives run on the process group's own stream (with gloo on its threads), and only the reader
waits. All ranks of a context-parallel group run the same plan, so all make these calls in one
order, as collectives require.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.device.fusion import has_triton
from megatron_prefix.device.transfer import on
from megatron_prefix.sidecar.arena import Both, Lengths, Payload, added, wider
from megatron_prefix.tree import cp_layout


class Pending(NamedTuple):
    """Tensors that collectives are writing; `wait` before reading them."""

    works: tuple[Any, ...]
    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """Waits and returns the tensors (on CUDA the stream waits, not the host)."""
        for work in self.works:
            work.wait()
        return self.tensors


class Exchange:
    """The collectives of one context-parallel group, for one step.

    Args:
        group: the process group.

    Attributes:
        rank: this rank's number in it.
        size: number of ranks.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self._tables: dict[tuple[str, Lengths], Tensor] = {}

    def gather(self, *parts: Tensor) -> Pending:
        """All ranks' positions [size * positions, ...]: one tensor, of `parts` [positions, ...]
        side by side in the last dimension."""
        mine = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0].contiguous()
        view = mine.new_empty((self.size * mine.shape[0], *mine.shape[1:]))
        work = dist.all_gather_into_tensor(view, mine, self._group, async_op=True)
        return Pending((work,), (view,))

    def reduce_scatter(self, view: Tensor) -> Pending:
        """This rank's part [positions, ...] of the sum of all views [size * positions, ...]."""
        mine = view.new_empty((view.shape[0] // self.size, *view.shape[1:]))
        work = dist.reduce_scatter_tensor(mine, view.contiguous(), group=self._group, async_op=True)
        return Pending((work,), (mine,))

    def total(self, mine: Tensor) -> Tensor:
        """The sum of all ranks' tensors of one shape, in the place of this rank's."""
        dist.all_reduce(mine, group=self._group, async_op=True).wait()
        return mine

    def send_runs(self, gradients: Both, lengths: Lengths, begin: Tensor | None) -> Pending:
        """This rank's part of the gradients of all ranks' own runs, summed in fp32 or wider.

        Args:
            gradients: of this rank's own runs; see `key_sums`.
            lengths: of the segment's spans, whole.
            begin: see `key_sums`.
        """
        table = functools.partial(self.table, lengths=lengths, device=gradients[0].device)
        return self.reduce_scatter(key_sums(gradients, table, sum(lengths), begin))

    def table(self, name: str, lengths: Lengths, device: torch.device) -> Tensor:
        """Places of keys on the device, int64, made once a step; see tree/cp_layout.py.

        Args:
            name: "order" and "dealt" of the view; "runs" of a level in it; the rank's "own" runs in
                it, their "own sums", and "own in order" of the segment.
            lengths: of the spans or runs, whole.
            device: of the keys.
        """
        places = self._tables.get((name, lengths))
        if places is None:
            places = on(device, _TABLES[name](lengths, self.rank, self.size))
            self._tables[name, lengths] = places
        return places

    def whole(self, mine: Tensor, lengths: Sequence[int]) -> Tensor:
        """A whole segment [1, positions, ...] in order, from the ranks' parts.

        Args:
            mine: this rank's part [1, positions / size, ...].
            lengths: of the segment's spans; they sum to `positions`.
        """
        (view,) = self.gather(mine.squeeze(0)).wait()
        return view.index_select(0, self.table("order", tuple(lengths), mine.device)).unsqueeze(0)

    def share(self, whole: Tensor, lengths: Sequence[int]) -> Tensor:
        """The reverse of `whole` for gradients: this rank's part of the sum over ranks."""
        view = torch.empty_like(whole[0])
        view[self.table("order", tuple(lengths), whole.device)] = whole[0]
        (mine,) = self.reduce_scatter(view).wait()
        return mine.unsqueeze(0)


_TABLES: dict[str, Callable[[Lengths, int, int], cp_layout.Index]] = {
    "order": lambda lengths, rank, size: cp_layout.order(lengths, size),
    "dealt": lambda lengths, rank, size: cp_layout.dealt(lengths, size),
    "runs": lambda lengths, rank, size: cp_layout.runs_in_view(lengths, size),
    "own": lambda lengths, rank, size: cp_layout.order(lengths, size)[
        cp_layout.own_runs(lengths, rank, size).visible
    ],
    "own sums": cp_layout.own_sums,
    "own in order": lambda lengths, rank, size: cp_layout.own_runs(lengths, rank, size).visible,
}


class GatheredKeys:
    """Own K and V of all ranks in one call of attention; see OwnKeys.

    The ranks begin to gather them at once, or they are kept.

    Args:
        exchange: the group's collectives.
        lengths: of the segment's spans, whole.
        both: this rank's K and V, [positions, kv_heads, dim] each.
        kept: returns what is kept for `runs`.
        begin: takes what descendants on this rank have sent, in the order of the view.
        sent: takes what descendants on all ranks have sent to this rank's K and V.
    """

    def __init__(
        self,
        exchange: Exchange,
        lengths: Lengths,
        both: Both,
        *,
        kept: Callable[[], Both] | None = None,
        begin: Callable[[], Tensor | None] | None = None,
        sent: Callable[[], Payload | None] | None = None,
    ) -> None:
        self._exchange, self._lengths, self._width = exchange, lengths, both[0].shape[-1]
        self._kept, self._begin, self._sent = kept, begin, sent
        if kept is None:
            self._coming: Pending = exchange.gather(*both)

    def runs(self) -> Both:
        """See OwnKeys."""
        if self._kept is not None:
            return self._kept()
        (view,) = self._coming.wait()
        rows = self._exchange.table("own", self._lengths, view.device)
        return halves(view.index_select(0, rows), self._width)

    def send(self, gradients: Both) -> None:
        """See OwnKeys: starts to send them to the ranks that own the keys."""
        begin = None if self._begin is None else self._begin()
        self._coming = self._exchange.send_runs(gradients, self._lengths, begin)

    def take(self) -> Both:
        """See OwnKeys; in fp32 or wider."""
        (both,) = self._coming.wait()
        mine = halves(both, self._width)
        return mine if self._sent is None else added(mine, self._sent())


def key_sums(
    gradients: Payload, table: Callable[[str], Tensor], num: int, begin: Tensor | None
) -> Tensor:
    """Gradients of a rank's own runs of keys, summed where the keys lie in an exchange: gK and gV
    side by side in fp32 or wider, [num, kv_heads, dim + value_dim].

    A rank's two runs of a span share their first keys (tree/cp_layout.py), so a key has up to two
    gradients, and some have none.

    Args:
        gradients: of the keys and of the values of all runs, [keys of runs, kv_heads, (value_)dim].
        table: places by name: "own", of every run's keys in the result; "own sums", the reverse
            (`cp_layout.own_sums`).
        num: positions of the result.
        begin: what is there already, in the shape of the result, and is changed; None: nothing.
    """
    if has_triton(gradients[0].device.type):
        from megatron_prefix.sidecar.key_sums_triton import key_sums_triton

        return key_sums_triton(gradients, table("own sums"), begin)
    runs = side_by_side(gradients)
    total = runs.new_zeros((num, *runs.shape[1:])) if begin is None else begin
    return total.index_add_(0, table("own"), runs)


def side_by_side(gradients: Payload) -> Tensor:
    """gK and gV in one tensor [positions, kv_heads, dim + value_dim] of fp32 or wider."""
    key_grad, value_grad = gradients
    width = key_grad.shape[-1] + value_grad.shape[-1]
    both = key_grad.new_empty((*key_grad.shape[:-1], width), dtype=wider(key_grad.dtype))
    return torch.cat([key_grad, value_grad], dim=-1, out=both)


def halves(both: Tensor, width: int) -> Both:
    """Keys, of this width, and values that lie side by side; views."""
    return both[..., :width], both[..., width:]
