"""Routes that routers have been told to follow, of all layers and all positions of a step.

A rank's routers know those of its own layers and, under sequence parallelism, of its own part of a
microbatch's positions. The first pipeline stage builds the tree, and two rollouts share a position
only where all layers send it to the same experts: so the ranks of a pipeline, and of tensor
parallelism, put together what they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.errors import refused
from megatron_prefix.features.replay.told import FORWARD, RECORD, Told
from megatron_prefix.refusals.table import (
    AHEAD_ROUTES,
    NUMBER_OF_ROUTES,
    RECORDS_ROUTES,
    SOME_ROUTES,
    UNKNOWN_ROUTES,
)
from megatron_prefix.run.calls import CallLayout
from megatron_prefix.run.rank import Rank, gathered


@dataclass(frozen=True)
class ToldRoutes:
    """What this rank's routers follow.

    Attributes:
        layers: numbers of the routers' layers in the whole model, from 0.
        rows: of every call int16 [tokens that a router sees, layers here, topk], on the device;
            () where no router follows routes.
        shape: layers of the whole model, and experts of a token.
        sequence_group: ranks that have a part each of a call's positions; None: all have all.
    """

    layers: tuple[int, ...]
    rows: tuple[Tensor, ...]
    shape: tuple[int, int]
    sequence_group: Any

    def gathered(
        self, layouts: Sequence[CallLayout], cp_size: int, pp: Any, device: torch.device
    ) -> list[Tensor]:
        """Routes of this rank's positions through all layers, sample by sample; all ranks of the
        pipeline and of tensor parallelism call this.

        Args:
            layouts: of the first stage's calls; () on other stages, which get nothing.
            cp_size: context-parallel ranks, each of which has an equal part of a call's positions.
            pp: the pipeline.
            device: where its tensors live.

        Returns:
            Of every call int16 [positions, layers, topk]; [] where no router follows routes.
        """
        full, layers = self._of_stages(self._of_positions(device), pp, device)
        if not layers or not layouts:
            return []
        lengths = [sum(layout.lengths) // cp_size for layout in layouts]
        if len(full) != sum(lengths):
            raise refused(NUMBER_OF_ROUTES, len(full), sum(lengths))
        table = full.new_zeros((len(full), *self.shape))
        table[:, torch.tensor(layers, device=full.device)] = full
        return [
            _by_sample(rows, layout)
            for rows, layout in zip(table.split(lengths), layouts, strict=True)
        ]

    def _of_positions(self, device: torch.device) -> Tensor:
        """[positions of all calls on this rank, layers here, topk]."""
        if not self.rows:
            return torch.zeros((0, 0, self.shape[1]), dtype=torch.int16, device=device)
        group, lengths = self.sequence_group, [len(rows) for rows in self.rows]
        local = torch.cat(self.rows).to(device)
        if group is None:
            return local
        parts = _gathered_rows(local, group).split(lengths * group.size())
        calls = len(lengths)
        return torch.cat([part for call in range(calls) for part in parts[call::calls]])

    def _of_stages(
        self, local_routes: Tensor, pp: Any, device: torch.device
    ) -> tuple[Tensor, list[int]]:
        """The layers of all stages side by side, and their numbers."""
        if pp.size() == 1:
            return local_routes, list(self.layers)
        head = torch.full((2 + self.shape[0],), -1, dtype=torch.int64, device=device)
        head[: 2 + len(self.layers)] = torch.tensor(
            [*local_routes.shape[:2], *self.layers], device=device
        )
        heads = _gathered_rows(head[None], pp).tolist()
        sizes = {num for num, count, *_ in heads if count}
        if len(sizes) > 1:
            raise refused(NUMBER_OF_ROUTES, max(sizes), min(sizes))
        if not sizes:
            return local_routes, []
        most = max(count for _, count, *_ in heads)
        padded = local_routes.new_zeros((sizes.pop(), most, self.shape[1]))
        padded[:, : local_routes.shape[1]] = local_routes
        parts = _gathered_rows(padded, pp).split(len(padded))
        by_stage = [part[:, :count] for part, (_, count, *_) in zip(parts, heads, strict=True)]
        return torch.cat(by_stage, 1), [
            n for _, count, *remainder in heads for n in remainder[:count]
        ]


def told_of(
    routers: Mapping[int, Any], calls: Sequence[Mapping[int, Told | None]]
) -> dict[int, tuple[Any, list[Told]]]:
    """By layer of a model chunk that has a router that was told something: the router, and what at
    each call.

    Args:
        routers: by layer.
        calls: what each was told, by layer, at every call of the chunk.

    Raises:
        CannotShare: at some calls only.
    """
    by_layer = {}
    for layer, router in routers.items() if calls else ():
        of_calls = [call[layer] for call in calls]
        routed_calls = [call for call in of_calls if call is not None]
        if 0 < len(routed_calls) < len(of_calls):
            raise refused(SOME_ROUTES)
        if routed_calls:
            by_layer[layer] = router, routed_calls
    return by_layer


def read_routes(told: Sequence[Mapping[int, tuple[Any, Sequence[Told]]]], rank: Rank) -> ToldRoutes:
    """What the routers of this rank have been told at its model calls.

    Args:
        told: of every model chunk what `told_of` says.
        rank: with these.

    Raises:
        CannotShare: they record routes; routes are not known, or not of all calls; a router of
            multi-token prediction has some.
    """
    followed: dict[int, list[Tensor]] = {}
    for by_layer, model in zip(told, rank.language_models, strict=True):
        num_ahead = len(model.decoder.layers)
        for layer, (router, calls) in by_layer.items():
            _check_routes(calls, ahead=layer >= num_ahead)
            followed[router.layer_number - 1] = [call.routes for call in calls]  # type: ignore[misc]
    layers = tuple(sorted(followed))
    rows = tuple(map(_stacked, zip(*(followed[layer] for layer in layers), strict=True)))
    shape = rank.config.num_layers, rank.config.moe_router_topk
    group = rank.groups.tp if rank.model.sequence_ranks > 1 else None
    return ToldRoutes(layers, rows, shape, group)


def _check_routes(calls: Sequence[Told], *, ahead: bool) -> None:
    """Refuses what one router was told at the calls of a step."""
    if any(call.action == RECORD for call in calls):
        raise refused(RECORDS_ROUTES)
    if ahead:
        raise refused(AHEAD_ROUTES)
    # The same tensor twice: set before the step, and not for each of its microbatches.
    sources = {call.source for call in calls if call.routes is not None and call.action == FORWARD}
    if len(sources) < len(calls):
        raise refused(UNKNOWN_ROUTES, calls[0].action)


def _stacked(routes: Sequence[Tensor]) -> Tensor:
    """[tokens, layers, topk] of one call."""
    if len({route.shape for route in routes}) > 1:
        raise refused(SOME_ROUTES)
    return torch.stack([*routes], 1)


def _by_sample(rows: Tensor, layout: CallLayout) -> Tensor:
    """A call's rows, sample behind sample: in a batch that is not packed they go by position."""
    if layout.packed or len(layout.lengths) == 1:
        return rows
    return rows.unflatten(0, (-1, len(layout.lengths))).transpose(0, 1).flatten(0, 1)


def _gathered_rows(local_routes: Tensor, group: Any) -> Tensor:
    """[ranks * n, ...] of every rank's [n, ...]; NCCL has no int16."""
    return gathered(local_routes.contiguous().view(torch.uint8), group).view(local_routes.dtype)
