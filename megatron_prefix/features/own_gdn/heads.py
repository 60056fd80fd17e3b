"""Context-parallel ranks of a trainer's own GatedDeltaNet exchange positions for heads.

Its projections work on each position, so a rank runs them on its own ones. Its convolution and its
rule go through a span from end to end: there a rank has all positions of a segment, and a part of
the channels or heads. (Megatron's own GatedDeltaNet does the same.) The trainer's way, which passes
states from rank to rank, begins every sequence with a state of zeros; a span begins with its
parent's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.layers.own_backward import with_backward
from megatron_prefix.tree import cp_layout

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext


class HeadParts:
    """The exchange for the spans of one segment.

    Args:
        group: the context-parallel ranks.
        lengths: of the spans, whole.
    """

    def __init__(self, group: Any, lengths: Sequence[int], device: torch.device) -> None:
        self._group, self._size = group, group.size()
        self._order, self._view = (
            to_device(device, places(lengths, self._size))
            for places in (cp_layout.view_order, cp_layout.view_positions)
        )

    def divided(self, x: Tensor) -> Tensor:
        """[1, positions on this rank, heads, ...] -> [1, positions, heads on this rank, ...]."""
        result: Tensor = with_backward(self._divide, self._join, x)
        return result

    def joined(self, x: Tensor) -> Tensor:
        """The reverse."""
        result: Tensor = with_backward(self._join, self._divide, x)
        return result

    def all_divided(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """`divided` of inputs [1, positions, heads] or [1, positions, heads, width], in one
        exchange for each dtype and number of heads."""
        rows = [x if x.dim() == 4 else x.unsqueeze(-1) for x in inputs]
        parts: dict[int, Tensor] = {}
        for like in dict.fromkeys((x.dtype, x.shape[2]) for x in rows):
            numbers = [n for n, x in enumerate(rows) if (x.dtype, x.shape[2]) == like]
            divided = self.divided(torch.cat([rows[n] for n in numbers], -1))
            widths = [rows[n].shape[-1] for n in numbers]
            parts |= zip(numbers, divided.split(widths, -1), strict=True)
        return [
            parts[number].contiguous() if x.dim() == 4 else parts[number].squeeze(-1).contiguous()
            for number, x in enumerate(inputs)
        ]

    def _divide(self, x: Tensor) -> Tensor:
        by_part = x[0].unflatten(1, (self._size, -1)).movedim(1, 0)
        return self._exchanged(by_part).flatten(0, 1).index_select(0, self._order)[None]

    def _join(self, x: Tensor) -> Tensor:
        by_rank = x[0].index_select(0, self._view).unflatten(0, (self._size, -1))
        return self._exchanged(by_rank).movedim(0, 1).flatten(1, 2)[None]

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Of one part [positions, ...] for each rank, the one from each rank."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received


def heads_of(context: SegmentContext, group: Any) -> HeadParts:
    """What context-parallel ranks exchange heads of a segment by; made in its first layer, for all
    of them."""
    parts: HeadParts | None = context.between.get(("heads", None))
    if parts is None:
        lengths = context.cache.map.lengths[context.index]
        parts = HeadParts(group, lengths, context.positions.device)
        context.between["heads", None] = parts
    return parts


def of_channels(convolution: Any, group: Any) -> Any:
    """A depthwise convolution of this rank's part of the channels, with the same parameters."""
    part = copy.copy(convolution)
    vars(part).pop("forward", None)  # what segments put there
    vars(part)["_parameters"] = {
        name: None if weight is None else weight.chunk(group.size())[group.rank()]
        for name, weight in vars(convolution)["_parameters"].items()  # those that it lacks, too
    }
    return part
