"""Routers that follow given routes: a segment's tokens go to the experts of their rollouts.

Megatron's RouterReplay gives a router the experts of one microbatch at a time, in the order of
forwards and, for activation recomputation, again in the order of backwards
(megatron/core/transformer/moe/router_replay.py). Segments run in another order. So the routes of a
segment are set around every forward of its router, also inside a backward, and the trainer's
settings are restored afterwards. As with the stock schedule, the trainer turns replay on by the
action that it sets, before it calls the schedule or in its forward steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.errors import UserError, refused
from megatron_prefix.refusals.table import RECORDS_ROUTES, UNKNOWN_ROUTES
from megatron_prefix.tree import Forest, Pairs, cp_layout


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
            mine = torch.from_numpy(cp_layout.held_positions(lengths, groups.cp.rank(), size))
            routes = routes.index_select(0, mine.to(device))
            self._offsets //= size
        self._routes = routes

    def of(self, router: Any, index: int, num_tokens: int) -> Tensor:
        """Experts of those tokens of a segment that this rank's router sees, [num_tokens, topk]."""
        routes = self._routes[self._offsets[index] : self._offsets[index + 1]]
        parts = len(routes) // num_tokens  # above 1 under sequence parallelism
        mine = routes if parts == 1 else routes.chunk(parts)[router.tp_group.rank()]
        return mine[:, router.layer_number - 1].long()


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
        action: RouterReplay's REPLAY_FORWARD.
        routers: that follow; others choose for themselves.
    """

    def __init__(self, routes: SegmentRoutes, action: Any, routers: Iterable[Any]) -> None:
        self._routes, self._action, self._routers = routes, action, [*routers]

    @contextlib.contextmanager
    def around(self, router: Any, index: int, num_tokens: int) -> Iterator[None]:
        """Surrounds a router's forward on `num_tokens` tokens of a segment."""
        if router not in self._routers:
            yield
            return
        replay = router.router_replay
        saved = dict(vars(replay))
        replay.replay_backward_list = []
        replay.set_target_indices(self._routes.of(router, index, num_tokens))
        replay.set_router_replay_action(self._action)
        try:
            yield
        finally:
            vars(replay).update(saved)


def forward_action(routers: Iterable[Any], routed: bool) -> Any:
    """RouterReplay's REPLAY_FORWARD if these routers follow routes in this pass, else None.

    Args:
        routers: Megatron's, of one model chunk.
        routed: whether the microbatches have routes.

    Raises:
        UserError: they replay and there are no routes, or they record routes.
    """
    actions = [_action(router) for router in followers(routers)]
    if any(action.name == "RECORD" for action in actions):
        raise refused(RECORDS_ROUTES)
    if actions and not routed:
        raise refused(UNKNOWN_ROUTES, actions[0].name)
    # The trainer's own enum: some trainers bring their own RouterReplay.
    return type(actions[0]).REPLAY_FORWARD if actions else None


def followers(routers: Iterable[Any]) -> list[Any]:
    """Those that have been told to do something with routes."""
    return [router for router in routers if _action(router) is not None]


def _action(router: Any) -> Any:
    return getattr(getattr(router, "router_replay", None), "router_replay_action", None)
