"""What trainers have their routers replay with: what a router is told, and how to tell it.

Megatron's RouterReplay (megatron/core/transformer/moe/router_replay.py; verl brings its own) holds
the experts of the microbatch that runs next. NeMo-RL, SkyRL and ms-swift set them in every forward
step, before the model call. slime and miles have a queue inside Megatron's top-k instead
(slime.utils.routing_replay, miles.utils.replay_base): one entry a microbatch, in their order,
and a stage for all queues that says whether forwards record or replay.

Either way a router has, at the model call, the routes of exactly those tokens that it is about to
see, so nothing of a trainer's batches has to be known.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_prefix.tree.forest import MOST_EXPERTS

RECORD, FORWARD = "RECORD", "REPLAY_FORWARD"
CHOOSES = -2
"""Instead of experts: the router chooses. -1 is a trainer's own mark, for it to understand."""
MARKS = 256
"""Numbers below zero that a trainer may have instead of experts; what they mean is its
routers' own business. They are counted from MOST_EXPERTS down, as experts are from zero."""
_STAGE = "ROUTING_REPLAY_STAGE"
_LISTS = ("replay_backward_list", "replay_backward_mask_list")
"""Attributes of RouterReplay with an entry for every microbatch whose backward is to come."""


class Told(NamedTuple):
    """What a router has been told at a model call.

    Attributes:
        action: name of RouterReplay's action, RECORD or FORWARD, or another that no model call has.
        routes: int [tokens that the router sees, topk]; CHOOSES where it chooses. None: not known.
        source: identity of the tensor that the trainer gave.
        kind: RouterReplay's own enum of actions; some trainers bring theirs.
        has_mask: whether some positions may be the router's own choice.
    """

    action: str
    routes: Tensor | None
    kind: Any = None
    has_mask: bool = False
    source: int = 0

    def kept(self) -> Told:
        """With routes of its own, as `marked` has them: a trainer may have one buffer for the
        routes of all microbatches."""
        if self.routes is None or self.action != FORWARD:
            return self._replace(routes=None)
        return self._replace(routes=marked(self.routes))


class Replays(Protocol):
    """How a router replays."""

    def told(self, number: int) -> Told | None:
        """What it is told for microbatch `number` of a call of the schedule; None: nothing."""

    def following(self, routes: Tensor, told: Told) -> contextlib.AbstractContextManager[None]:
        """Has the router's next forward follow routes [tokens, topk]; then all is as before."""

    def passed(self, num: int, *, backward: bool) -> None:
        """Leaves what the stock schedule leaves after forwards of `num` microbatches and, with
        activation recomputation, their backwards."""


class RouterReplays:
    """By a RouterReplay of Megatron or of verl."""

    def __init__(self, replay: Any) -> None:
        self._replay = replay

    def told(self, number: int) -> Told | None:
        """See Replays."""
        action = self._replay.router_replay_action
        if action is None:
            return None
        routes, mask = (
            getattr(self._replay, name, None) for name in ("target_topk_idx", "target_replay_mask")
        )
        if routes is not None and mask is not None:
            uses_route = mask.to(routes.device).reshape(-1, 1)
            routes = routes.masked_fill(~uses_route.bool(), CHOOSES)
        source = id(self._replay.target_topk_idx)
        return Told(action.name, routes, type(action), mask is not None, source)

    @contextlib.contextmanager
    def following(self, routes: Tensor, told: Told) -> Iterator[None]:
        """See Replays."""
        replay, saved = self._replay, dict(vars(self._replay))
        vars(replay).update({name: [] for name in _LISTS if name in saved})
        if told.has_mask:
            mask = (routes != CHOOSES).all(1)
            replay.set_target_indices(routes.where(mask[:, None], 0), replay_mask=mask)
        else:
            replay.set_target_indices(routes)
        replay.set_router_replay_action(told.kind[FORWARD])
        try:
            yield
        finally:
            vars(replay).update(saved)

    def passed(self, num: int, *, backward: bool) -> None:
        """See Replays."""
        if backward:
            for entries in lists_of(self._replay).values():
                entries.clear()


class Queue:
    """By a queue of slime or of miles.

    Args:
        queue: the router's own.
        manager: miles', of queues of something else than routes.
    """

    def __init__(self, queue: Any, manager: Any = None) -> None:
        stages = _Manager(manager) if manager else _stages(type(queue).__module__)
        self._queue, self._stages = queue, stages

    def told(self, number: int) -> Told | None:
        """See Replays."""
        stage = self._stages.now()
        if stage in ("", "fallthrough"):
            return None
        entries, place = self._queue.top_indices_list, self._queue.forward_index + number
        entry = entries[place] if place < len(entries) else None
        return Told(stage.upper(), entry if isinstance(entry, Tensor) else None, source=id(entry))

    @contextlib.contextmanager
    def following(self, routes: Tensor, told: Told) -> Iterator[None]:
        """See Replays."""
        queue, saved, stage = self._queue, dict(vars(self._queue)), self._stages.now()
        queue.top_indices_list, queue.forward_index = [routes], 0
        self._stages.set(FORWARD.lower())
        try:
            yield
        finally:
            vars(queue).update(saved)
            self._stages.set(stage)

    def passed(self, num: int, *, backward: bool) -> None:
        """See Replays. Where nothing is recomputed, nobody looks at the place of backwards."""
        self._queue.forward_index += num
        if backward:
            self._queue.backward_index += num


class _Environment:
    """slime's stage: a variable of the environment."""

    @staticmethod
    def is_enabled() -> bool:
        return os.environ.get("ENABLE_ROUTING_REPLAY") == "1"

    @staticmethod
    def now() -> str:
        return os.environ.get(_STAGE, "") if _Environment.is_enabled() else ""

    @staticmethod
    def set(stage: str) -> None:
        os.environ[_STAGE] = stage


class _Manager:
    """miles' stage, on the object that manages the queues of all routers."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def now(self) -> str:
        return self._manager.stage if self._manager.enabled else ""

    def set(self, stage: str) -> None:
        self._manager.stage = stage


def _stages(module: str) -> Any:
    manager = getattr(sys.modules.get(module), "routing_replay_manager", None)
    return _Environment if manager is None else _Manager(manager)


def managers() -> list[Any]:
    """miles' managers, whose stage a forward step changes around its model call."""
    return [*getattr(sys.modules.get("miles.utils.replay_base"), "all_replay_managers", ())]


def lists_of(replay: Any) -> dict[str, list[Any]]:
    """Lists of a RouterReplay with an entry for every microbatch whose backward is to come."""
    return {name: vars(replay)[name] for name in _LISTS if name in vars(replay)}


def replays_of(router: Any) -> Replays | None:
    """How a router replays; None: it cannot."""
    if (queue := getattr(router, "routing_replay", None)) is not None:
        return Queue(queue)
    replay = getattr(router, "router_replay", None)
    return None if replay is None else RouterReplays(replay)


def marked(routes: Tensor) -> Tensor:
    """Routes as a trainer has them, with its numbers below zero moved above all experts; int16."""
    return torch.where(routes < 0, routes + MOST_EXPERTS, routes).to(torch.int16)


def told(router: Any, number: int) -> Told | None:
    """What a router is told for microbatch `number` of a call of the schedule; None: nothing."""
    replays = replays_of(router)
    return None if replays is None else replays.told(number)


def is_known(router: Any) -> bool:
    """Whether a router's queue, if it has one, is as slime and miles have it."""
    names = ("top_indices_list", "forward_index", "backward_index")
    queue = getattr(router, "routing_replay", None)
    return queue is None or all(hasattr(queue, name) for name in names)
