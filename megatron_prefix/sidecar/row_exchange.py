"""Context parallelism: ranks exchange K/V before attention, and gK/gV after it.

Every span of a segment is cut zig-zag (tree/cp_layout.py). Queries stay on their rank. Ranks
exchange K/V in the forward, gK/gV in the backward and, on the last stage, the outputs of scored
segments, one number a token.

What of K and V of whole positions each rank keeps is in features/context_parallel.

Collectives run on the process group's own stream (with gloo on its threads), and only the reader
waits. All ranks of a context-parallel group run the same plan, so all make these calls in one
order, as collectives require.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.sidecar.arena import KeyValue, Lengths, Payload, wider
from megatron_prefix.tree import cp_layout

Places = Callable[[Lengths, int, int], cp_layout.Index]
"""Lengths of a segment's spans or runs, whole, a rank and the number of ranks -> places."""


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
        self._tables: dict[tuple[Places, Lengths], Tensor] = {}

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

    def table(self, places: Places, lengths: Lengths, device: torch.device) -> Tensor:
        """Places on the device, int64, made once a step."""
        table = self._tables.get((places, lengths))
        if table is None:
            table = to_device(device, places(lengths, self.rank, self.size))
            self._tables[places, lengths] = table
        return table

    def whole(self, local: Tensor, lengths: Sequence[int]) -> Tensor:
        """A whole segment [1, positions, ...] in order, from the ranks' parts.

        Args:
            local: this rank's part [1, positions / size, ...].
            lengths: of the segment's spans; they sum to `positions`.
        """
        (view,) = self.gather(local.squeeze(0)).wait()
        return view.index_select(
            0, self.table(segment_order, tuple(lengths), local.device)
        ).unsqueeze(0)

    def share(self, total: Tensor, lengths: Sequence[int]) -> Tensor:
        """The reverse of `total` for gradients: this rank's part of the sum over ranks."""
        view = torch.empty_like(total[0])
        view[self.table(segment_order, tuple(lengths), total.device)] = total[0]
        (local,) = self.reduce_scatter(view).wait()
        return local.unsqueeze(0)


def segment_order(lengths: Lengths, rank: int, size: int) -> cp_layout.Index:
    """Where the positions of a segment are in what `gather` returns."""
    return cp_layout.view_order(lengths, size)


def side_by_side(gradients: Payload) -> Tensor:
    """gK and gV in one tensor [positions, kv_heads, dim + value_dim] of fp32 or wider."""
    key_grad, value_grad = gradients
    width = key_grad.shape[-1] + value_grad.shape[-1]
    joined = key_grad.new_empty((*key_grad.shape[:-1], width), dtype=wider(key_grad.dtype))
    return torch.cat([key_grad, value_grad], dim=-1, out=joined)


def halves(key_value: Tensor, width: int) -> KeyValue:
    """Keys, of this width, and values that lie side by side; views."""
    return key_value[..., :width], key_value[..., width:]
