"""Routers that follow given routes: a segment's tokens go to the experts of their rollouts.

Trainers give a router the experts of one microbatch at a time, in the order of forwards and, for
activation recomputation, again in the order of backwards (told.py). Segments run in another
order. So the routes of a segment are set around every forward of its router, also inside a
backward, and the trainer's settings are restored afterwards. As with the stock schedule, the
trainer turns replay on by the action that it sets, before it calls the schedule or in its forward
steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.features.replay.told import MARKS, Told, replays_of
from megatron_prefix.tree import Forest, Pairs, cp_layout
from megatron_prefix.tree.forest import MOST_EXPERTS


class SegmentRoutes:
    """The routes of all positions of a step's segments, on the device.

    The first pipeline stage takes them from the rollouts and sends them to the others.

    Args:
        forest: the step's segments.
        rollouts: what the forest was built from; used on the first stage only.
        shape: layers of the whole model, and experts of a token.
        groups: process groups of the pipeline and of context parallelism, whose ranks share the
            positions of every segment.
        device: where the model is.

    Raises:
        UserError: routes of another model.
    """

    def __init__(
        self,
        forest: Forest,
        rollouts: Sequence[Pairs] | None,
        shape: tuple[int, int],
        groups: Any,
        device: torch.device,
    ) -> None:
        self._offsets = np.cumsum([0, *(segment.padded_length for segment in forest.segments)])
        table = np.empty((self._offsets[-1], *shape), np.int16)
        if groups.pp.rank() == 0:
            _fill(table, forest, rollouts or (), self._offsets)
        routes = torch.from_numpy(table).to(device)
        if groups.pp.size() > 1:
            source = dist.get_process_group_ranks(groups.pp)[0]
            dist.broadcast(routes.view(torch.uint8), source, group=groups.pp)  # NCCL has no int16
        if (size := groups.cp.size()) > 1:
            lengths = [span.padded for segment in forest.segments for span in segment.spans]
            local = torch.from_numpy(cp_layout.held_positions(lengths, groups.cp.rank(), size))
            routes = routes.index_select(0, local.to(device))
            self._offsets //= size
        self._routes = routes

    def of(self, router: Any, index: int, num_tokens: int) -> Tensor:
        """Experts of those tokens of a segment that this rank's router sees, [num_tokens, topk]."""
        routes = self._routes[self._offsets[index] : self._offsets[index + 1]]
        parts = len(routes) // num_tokens  # above 1 under sequence parallelism
        local = routes if parts == 1 else routes.chunk(parts)[router.tp_group.rank()]
        numbers = local[:, router.layer_number - 1].long()
        return torch.where(numbers < MOST_EXPERTS - MARKS, numbers, numbers - MOST_EXPERTS)


def _fill(
    table: np.ndarray, forest: Forest, rollouts: Sequence[Pairs], offsets: np.ndarray
) -> None:
    """Writes the routes of all segments' positions."""
    table[:] = np.arange(table.shape[2])  # padding goes to any experts, each once
    for segment, offset in zip(forest.segments, offsets, strict=False):
        for span in segment.spans:
            for rollout in span.rollouts[:1]:  # a filler has none
                routes = rollouts[rollout].routes
                if routes is None or routes.shape[1:] != table.shape[1:]:
                    shape = None if routes is None else list(routes.shape[1:])
                    raise UserError(
                        f"rollout {rollout} has routes of [layers, topk] {shape}, the model"
                        f" {list(table.shape[1:])}: give those of all layers, also of dense ones"
                    )
                table[offset : offset + span.length] = routes[span.start : span.end]
            offset += span.padded


class Replay:
    """Makes routers of a model chunk follow the routes of a step.

    Args:
        routes: the step's.
        told: what each router that follows has been told; others choose for themselves.
    """

    def __init__(self, routes: SegmentRoutes, told: Mapping[Any, Told]) -> None:
        self._routes, self._told = routes, dict(told)

    @contextlib.contextmanager
    def around(self, router: Any, index: int, num_tokens: int) -> Iterator[None]:
        """Surrounds a router's forward on `num_tokens` tokens of a segment."""
        replay = replays_of(router) if router in self._told else None
        if replay is None:
            yield
            return
        with replay.following(self._routes.of(router, index, num_tokens), self._told[router]):
            yield
