"""Routing replay: runs whose routers send every token to the experts that one run chose.

Experts are a choice, so a difference of one rounding sends a token that is nearly undecided to
another expert, and nothing continuous connects the two results. Runs that follow the same routes
differ by rounding alone. A microbatch then has the field `routes`, int16 [1, positions, layers,
topk], the experts of every position in every layer (zeros in dense ones), and Megatron's
RouterReplay gets them before every model call (megatron/core/transformer/moe/router_replay.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.features.experts.routers import routers
from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import ModelSpec

Microbatch = dict[str, Any]
Routes = dict[tuple[str, str], NDArray[np.int16]]
"""By group and uid of a rollout of n tokens: [n-1 and padding, layers, topk]."""

CONFIG = {"moe_enable_routing_replay": True, "moe_router_fusion": False}
"""Of Megatron's TransformerConfig: routers that can record routes and follow them, which fused ones
do not (transformer/moe/moe_utils.py, `topk_routing_with_score_function`)."""


def check(spec: ModelSpec, recompute: str) -> None:
    """Refuses what cannot follow routes.

    Raises:
        UserError: a model without experts; or one whose routers run again in the backward pass,
            where RouterReplay has the routes of the microbatch whose forward was the last.
    """
    if spec.num_moe_experts is None:
        raise UserError(
            f"--same-routes with --model {spec.name}: it has no experts; leave --same-routes out"
        )
    if recompute == "full":
        raise UserError(
            "--same-routes with --recompute full: routers would run again in the backward pass,"
            " where the routes of their microbatch are not known; use selective or none"
        )


def shape_of(spec: ModelSpec) -> tuple[int, int]:
    """Layers, and experts of a token."""
    return spec.num_layers, spec.moe_router_topk


# Following ----------------------------------------------------------------------------------------


def with_routes(groups: Sequence[Group], routes: Routes, shape: tuple[int, int]) -> list[Group]:
    """The groups with the routes of every rollout; one without loss may have none, and gets any.

    Raises:
        KeyError: a rollout that `routes` lacks.
    """

    def routed(rollout: Rollout) -> Rollout:
        num, key = len(rollout) - 1, (rollout.group, rollout.uid)
        if key in routes or rollout.loss:
            return replace(rollout, routes=routes[key][:num])
        return replace(rollout, routes=any_routes(num, shape))

    return [replace(group, rollouts=tuple(map(routed, group.rollouts))) for group in groups]


def any_routes(num: int, shape: tuple[int, int]) -> NDArray[np.int16]:
    """Routes of positions that nobody reads, [num, layers, topk]: different experts each."""
    return np.tile(np.arange(shape[1], dtype=np.int16), (num, shape[0], 1))


def of_call(call: Any) -> Tensor | None:
    """The routes of a captured model call, for `Callbacks.routes`."""
    return call.drawn.get("routes") if isinstance(call.drawn, Mapping) else None


@contextlib.contextmanager
def followed(chunks: Sequence[Any], items: Sequence[Microbatch]) -> Iterator[None]:
    """Around a schedule's call: routers follow the microbatches' routes, if these have any."""
    if not any("routes" in item for item in items):
        yield
        return
    with acting(chunks, "REPLAY_FORWARD"):
        yield


def give(model: Any, item: Mapping[str, Any]) -> None:
    """Before a model call: the routers of this chunk get the routes of its microbatch."""
    if "routes" not in item:
        return
    for router in routers(unwrap(model)).values():
        experts = item["routes"][0, :, router.layer_number - 1]
        mine = experts[seen(router, len(experts))]
        replayed = router.router_replay
        replayed.replay_backward_list.clear()  # for recomputation; it would only grow
        replayed.set_target_indices(mine.to(router.weight.device, torch.int64, non_blocking=True))


def seen(router: Any, num: int) -> slice:
    """Which of a microbatch's positions this rank's router sees; with tensor parallelism Megatron
    trains experts under sequence parallelism only."""
    part, rank = num // router.tp_group.size(), router.tp_group.rank()
    return slice(rank * part, (rank + 1) * part)


@contextlib.contextmanager
def acting(chunks: Sequence[Any], action: str) -> Iterator[None]:
    """Routers record or follow routes inside, and decide for themselves outside, as before."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    every = [r.router_replay for chunk in chunks for r in routers(unwrap(chunk)).values()]
    try:
        for one in every:
            one.set_router_replay_action(RouterReplayAction[action])
        yield
    finally:
        for one in every:
            one.clear_router_replay_action()
            one.clear_indices()
