"""Which keys of the pool queries of a segment see: those of their rollout up to their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import Level

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext

MAX_SCORES = 1 << 26
"""Most scores of all heads at once, but for those of a single query: a quarter of a GiB in fp32, of
which a few lie side by side."""


class VisibleKeys(NamedTuple):
    """What some queries of one span see.

    Attributes:
        first, stop: the queries.
        rows: of [what is read level by level, own keys], in the order of positions, int64; the
            last is the last query's own.
    """

    first: int
    stop: int
    rows: Tensor


def seen_of(context: SegmentContext, num_heads: int, device: torch.device) -> list[VisibleKeys]:
    """What a segment's queries see, made once a step.

    Args:
        context: the segment.
        num_heads: by which scores are counted; see MAX_SCORES.
        device: of the rows.
    """

    def make() -> list[VisibleKeys]:
        ends = itertools.accumulate(context.cache.map.lengths[context.index], initial=0)
        result = []
        for first, stop in itertools.pairwise(ends):
            rows: Tensor = to_device(
                device, _key_rows(context.cache.map.levels[context.index], first, stop)
            )
            step = max(1, MAX_SCORES // (num_heads * len(rows)))
            for begin in range(first, stop, step):
                end = min(begin + step, stop)
                result.append(VisibleKeys(begin, end, rows[: len(rows) - (stop - end)]))
        return result

    return context.cache.once(context.index, VisibleKeys, make)


def _key_rows(levels: Sequence[Level], first: int, stop: int) -> cp_layout.Index:
    """What the queries [first, stop) of one span see of [its segment's levels, own keys]."""
    rows, at = [], 0
    for level in levels:
        for run in level.runs:
            if run.first <= first and stop <= run.stop:
                rows.append(np.arange(at, at + run.end - run.start))
            at += run.end - run.start
    return np.concatenate([*rows, np.arange(at + first, at + stop)])
