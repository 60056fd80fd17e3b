"""What a forward step changes of its routers' replay, put back while it is suspended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_prefix.features.replay.told import lists_of, managers
from megatron_prefix.run.read.forward_step_state import Swap


def replayed_routes(routers: Sequence[Any]) -> Swap:
    """What RouterReplay is to do in the routers of a model: actions, and routes to follow.

    It is kept and set again, and not put back in between: the segments look at the action. What a
    step has added for its backward is taken away, and added again when the step goes on: a stock
    schedule finds there what it would have found, and no entry of a later microbatch.
    """
    replays = [getattr(router, "router_replay", None) for router in routers]
    replays = [replay for replay in replays if replay is not None]
    before: list[dict[str, tuple[list[Any], int]]] = []
    goes_on = [False]

    def taken(replay: Any, previous: dict[str, tuple[list[Any], int]]) -> dict[str, Any]:
        saved = dict(vars(replay))
        for name, entries in lists_of(replay).items():
            same, num = previous[name]
            start = num if entries is same else 0
            saved[name] = entries[start:]
            del entries[start:]
        return saved

    def swap(
        saved_lists: list[dict[str, Any]] | None, entering: bool
    ) -> list[dict[str, Any]] | None:
        if not entering:
            if goes_on[0]:  # to its end, and what it has added stays
                return None
            return [
                taken(replay, previous) for replay, previous in zip(replays, before, strict=True)
            ]
        result = [lists_of(replay) for replay in replays]
        before[:] = [
            {name: (entries, len(entries)) for name, entries in own.items()} for own in result
        ]
        goes_on[0] = saved_lists is not None
        for replay, own, saved in zip(replays, result, saved_lists or (), strict=False):
            vars(replay).update({n: value for n, value in saved.items() if n not in own})
            for name, entries in own.items():
                entries.extend(saved[name])
        return None

    return swap


def stages_of_queues() -> Swap:
    """Whether queues of routes record or replay, in miles; slime has that in the environment."""
    outside = [manager.stage for manager in managers()]

    def swap(stages: list[str] | None, entering: bool) -> list[str] | None:
        if entering and stages is None:
            return None
        inside = [manager.stage for manager in managers()]
        for manager, stage in zip(managers(), stages or outside, strict=True):
            manager.stage = stage
        return inside

    return swap
