"""Faults that are put into the package on purpose: every one makes rows wrong, or the rows prove
nothing. By name what replaces what."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_prefix.features.across.span_sums import SpanSums
from megatron_prefix.features.experts import tokens
from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.ledger import RouterLedger
from megatron_prefix.features.mtp.tables import Division

_COLUMNS, _CLOSING = tokens.columns_of, tokens.LogicalTokens.closing
_IN_LOSS = Division.in_loss
_ENTER, _PUT = GroupCounts.enter, SpanSums.put


def _first_rollout(rows: Any, *place: int) -> list[np.ndarray]:
    """Every row stands for its first rollout only."""
    return _COLUMNS([span._replace(rollouts=span.rollouts[:1]) for span in rows], *place)


def _one_microbatch(self: tokens.LogicalTokens, microbatches: tuple[int, ...]) -> tokens.Closing:
    """Microbatches that end together are one."""
    closing = _CLOSING(self, microbatches)
    return closing._replace(place=torch.zeros_like(closing.place))


def _this_rank(self: GroupCounts, router: Any) -> int:
    """Counts of this rank only."""
    return _ENTER(self, SimpleNamespace(tp_dp_cp_group=SimpleNamespace(size=lambda: 1)))


def _each_by_itself(self: RouterLedger, layer: int, microbatches: tuple[int, ...]) -> torch.Tensor:
    """Counts of each microbatch, not of those before it too."""
    place = self._places[layer]
    return torch.stack([self._group_counts.take(place, m) for m in microbatches])


def _nothing_of_others(self: SpanSums, layer: int, index: int, name: str, sums: Any) -> None:
    """Nothing is counted for other ranks."""
    _PUT(self, layer, index, name, torch.zeros_like(sums))


def _share_of_the_other(self: Division, left: Any, whole: Any) -> Any:
    """The owner's share of a context-parallel rank is taken for that of the other."""
    return _IN_LOSS(self, left[:, ::-1], whole[:, ::-1])


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "rows for tokens": (tokens, "columns_of", _first_rollout),
    "waves for microbatches": (tokens.LogicalTokens, "closing", _one_microbatch),
    "counts of a rank": (GroupCounts, "enter", _this_rank),
    "counts in no order": (RouterLedger, "_averages", _each_by_itself),
    "the other rank's share": (Division, "in_loss", _share_of_the_other),
    "no counts for other ranks": (SpanSums, "put", _nothing_of_others),
}
"""Owner, name, and what stands there instead."""
