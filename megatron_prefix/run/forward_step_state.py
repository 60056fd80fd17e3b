"""State of a model and of Megatron that a forward step may change around its model call.

Each function gives a `Swap` (suspend.py): it puts what a suspended step has changed out of the way,
and back when the step goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.tensor_parallel import random as megatron_random

from megatron_prefix.run.suspend import Swap


def training_modes(model: Any) -> Swap:
    """`train()` and `eval()` of a model and of its parts."""
    modules = list(model.modules())
    outside = [module.training for module in modules]

    def swap(wanted: list[bool] | None, entering: bool) -> list[bool] | None:
        if entering and wanted is None:
            return None
        inside = [module.training for module in modules]
        changed = inside != outside
        if changed or wanted is not None:
            for module, flag in zip(modules, wanted or outside, strict=True):
                module.training = flag
        return inside if changed else None

    return swap


def environment() -> Swap:
    """Variables of the environment: slime tells its routers by one what a call is for."""
    # Private, for comparing: the public way reads every variable anew, twice a microbatch.
    encoded = os.environ._data  # type: ignore[attr-defined]
    outside, before = dict(os.environ), dict(encoded)

    def swap(wanted: dict[str, str] | None, entering: bool) -> dict[str, str] | None:
        if entering and wanted is None:
            return None
        inside = dict(os.environ) if encoded != before else None
        if inside is not None or wanted is not None:
            os.environ.clear()
            os.environ.update(wanted or outside)
        return inside

    return swap


def replayed_routes(routers: Sequence[Any]) -> Swap:
    """What RouterReplay is to do in the routers of a model: actions, and routes to follow.

    It is kept and set again, and not put back in between: the segments look at the action.
    """
    replays = [getattr(router, "router_replay", None) for router in routers]
    replays = [replay for replay in replays if replay is not None]

    def swap(wanted: list[dict[str, Any]] | None, entering: bool) -> list[dict[str, Any]] | None:
        if not entering:
            return [dict(vars(replay)) for replay in replays]
        for replay, values in zip(replays, wanted or (), strict=False):
            vars(replay).update(values)
        return None

    return swap


@contextlib.contextmanager
def watched_forks() -> Iterator[Swap]:
    """Forks of Megatron's tracker of random states that a step is inside of.

    A fork puts another state into the generator, and at its end the one that it found.  For a
    suspended step the generator gets back what its outermost fork found, and the forks end with
    what the generator has by then.
    """
    tracker, forks = megatron_random.get_cuda_rng_tracker(), []  # type: ignore[var-annotated]
    stock, before = tracker.fork, vars(tracker).get("fork")

    @contextlib.contextmanager
    def fork(*args: Any, **kwargs: Any) -> Iterator[None]:
        forks.append((_state(tracker), _name(tracker)))
        before = forks[-1]
        try:
            with stock(*args, **kwargs):
                yield
        finally:
            outside = forks.pop()
            if outside is not before:  # it was suspended inside
                _set(tracker, *outside)

    def swap(wanted: list[Any] | None, entering: bool) -> list[Any] | None:
        inside = [*forks, (_state(tracker), _name(tracker))] if forks else None
        outside = forks[0] if forks else None
        forks.clear()
        if wanted:
            forks[:] = [(_state(tracker), _name(tracker)), *wanted[1:-1]]
            outside = wanted[-1]
        if outside is not None:
            _set(tracker, *outside)
        return inside

    tracker.fork = fork
    try:
        yield swap
    finally:
        del tracker.fork
        if before is not None:  # of a schedule that this one runs inside of
            tracker.fork = before


def _state(tracker: Any) -> Any:
    return megatron_random._get_cuda_rng_state(graph_safe=_graph_safe(tracker))


def _set(tracker: Any, state: Any, name: str | None) -> None:
    megatron_random._set_cuda_rng_state(state, graph_safe=_graph_safe(tracker))
    if name is not None:
        tracker._current_state_name = name


def _name(tracker: Any) -> str | None:
    """The state that the generator has now; releases before 0.16 do not say."""
    return getattr(tracker, "_current_state_name", None)


def _graph_safe(tracker: Any) -> bool:
    return getattr(tracker, "use_cudagraphable_rng", False)
