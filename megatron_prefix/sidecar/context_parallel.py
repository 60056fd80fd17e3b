"""Context parallelism: ranks exchange K/V before attention, and gK/gV after it.

Every span of a segment is cut zig-zag (tree/cp_layout.py). Queries stay on their rank. Ranks
exchange K/V in the forward, gK/gV in the backward and, on the last stage, the outputs of scored
segments, one number a token.

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
from megatron_prefix.device.transfer import to_device
from megatron_prefix.sidecar.arena import KeyValue, Lengths, Payload, wider, with_returned
from megatron_prefix.tree import cp_layout


class Pending(NamedTuple):
    """Tensors that collectives are still writing."""

    works: tuple[Any, ...]
    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """Waits and returns the tensors (on CUDA the stream waits, not the host)."""
        for work in self.works:
            work.wait()
        return self.tensors


class RowExchange:
    """The collectives of one context-parallel process group, for one step."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self._tables: dict[tuple[str, Lengths], Tensor] = {}

    def gather(self, *parts: Tensor) -> Pending:
        """All ranks' positions [size * positions, ...]: one tensor, of `parts` [positions, ...]
        side by side in the last dimension."""
        local = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0].contiguous()
        view = local.new_empty((self.size * local.shape[0], *local.shape[1:]))
        work = dist.all_gather_into_tensor(view, local, self._group, async_op=True)
        return Pending((work,), (view,))

    def reduce_scatter(self, view: Tensor) -> Pending:
        """This rank's part [positions, ...] of the sum of all views [size * positions, ...]."""
        local = view.new_empty((view.shape[0] // self.size, *view.shape[1:]))
        work = dist.reduce_scatter_tensor(
            local, view.contiguous(), group=self._group, async_op=True
        )
        return Pending((work,), (local,))

    def total(self, local: Tensor) -> Tensor:
        """The sum of all ranks' tensors of one shape, in place."""
        dist.all_reduce(local, group=self._group, async_op=True).wait()
        return local

    def send_runs(self, gradients: KeyValue, lengths: Lengths, begin: Tensor | None) -> Pending:
        """This rank's part of the gradients of all ranks' own runs, summed in fp32 or wider.

        Args:
            lengths: of the segment's spans, whole.
        """
        table = functools.partial(self.table, lengths=lengths, device=gradients[0].device)
        return self.reduce_scatter(key_sums(gradients, table, sum(lengths), begin))

    def table(self, name: str, lengths: Lengths, device: torch.device) -> Tensor:
        """Places of keys on the device, int64, made once a step; see tree/cp_layout.py.

        Args:
            name: "order" and "dealt" of the view; "runs" of a level in it; the rank's "own" runs in
                it, their "own sums", and "own in order" of the segment.
            lengths: of the spans or runs, whole.
        """
        places = self._tables.get((name, lengths))
        if places is None:
            places = to_device(device, _TABLES[name](lengths, self.rank, self.size))
            self._tables[name, lengths] = places
        return places

    def whole(self, local: Tensor, lengths: Sequence[int]) -> Tensor:
        """A whole segment [1, positions, ...] in order, from the ranks' parts.

        Args:
            local: this rank's part [1, positions / size, ...].
            lengths: of the segment's spans; they sum to `positions`.
        """
        (view,) = self.gather(local.squeeze(0)).wait()
        return view.index_select(0, self.table("order", tuple(lengths), local.device)).unsqueeze(0)

    def share(self, total: Tensor, lengths: Sequence[int]) -> Tensor:
        """The reverse of `total` for gradients: this rank's part of the sum over ranks."""
        view = torch.empty_like(total[0])
        view[self.table("order", tuple(lengths), total.device)] = total[0]
        (local,) = self.reduce_scatter(view).wait()
        return local.unsqueeze(0)


_TABLES: dict[str, Callable[[Lengths, int, int], cp_layout.Index]] = {
    "order": lambda lengths, rank, size: cp_layout.view_order(lengths, size),
    "dealt": lambda lengths, rank, size: cp_layout.view_positions(lengths, size),
    "runs": lambda lengths, rank, size: cp_layout.runs_in_view(lengths, size),
    "own": lambda lengths, rank, size: cp_layout.view_order(lengths, size)[
        cp_layout.own_runs(lengths, rank, size).visible
    ],
    "own sums": cp_layout.own_sums,
    "own in order": lambda lengths, rank, size: cp_layout.own_runs(lengths, rank, size).visible,
}


class GatheredKeys:
    """Own K and V of all ranks in one call of attention; gathering starts at once unless `saved`.

    Args:
        saved: returns saved keys and values of `runs`.
        begin: returns gradients from descendants on this rank, in the order of the view.
        returned: returns gradients from descendants on all ranks to this rank's K and V.
    """

    def __init__(
        self,
        exchange: RowExchange,
        lengths: Lengths,
        key_value: KeyValue,
        *,
        saved: Callable[[], KeyValue] | None = None,
        begin: Callable[[], Tensor | None] | None = None,
        returned: Callable[[], Payload | None] | None = None,
    ) -> None:
        self._exchange, self._lengths, self._width = exchange, lengths, key_value[0].shape[-1]
        self._saved, self._begin, self._returned = saved, begin, returned
        if saved is None:
            self._coming: Pending = exchange.gather(*key_value)

    def runs(self) -> KeyValue:
        if self._saved is not None:
            return self._saved()
        (view,) = self._coming.wait()
        rows = self._exchange.table("own", self._lengths, view.device)
        return halves(view.index_select(0, rows), self._width)

    def send(self, gradients: KeyValue) -> None:
        begin = None if self._begin is None else self._begin()
        self._coming = self._exchange.send_runs(gradients, self._lengths, begin)

    def take(self) -> KeyValue:
        """In fp32 or wider."""
        (key_value,) = self._coming.wait()
        local = halves(key_value, self._width)
        return local if self._returned is None else with_returned(local, self._returned())


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
    joined = key_grad.new_empty((*key_grad.shape[:-1], width), dtype=wider(key_grad.dtype))
    return torch.cat([key_grad, value_grad], dim=-1, out=joined)


def halves(key_value: Tensor, width: int) -> KeyValue:
    """Keys, of this width, and values that lie side by side; views."""
    return key_value[..., :width], key_value[..., width:]
