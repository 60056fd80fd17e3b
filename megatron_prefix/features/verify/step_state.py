"""What a training step changes besides the weights, as it was before the step, and put back.

Gradients, buffers of modules (experts' token counts and biases), Megatron's logs of auxiliary and
multi-token losses, generators of random numbers, routes that routers replay, and variables that a
forward step shares with its loss, with the lists, dicts and sets that these name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from megatron_prefix.features.experts.routers import routers
from megatron_prefix.features.verify.logs import logged_ahead
from megatron_prefix.run.execute.rewind import Rewind
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.loss_variables import places
from megatron_prefix.run.read.random_numbers import saved_generators


def _refill(container: Any, items: Any) -> None:
    container.clear()
    container.update(items)


_REFILLED: dict[type, Callable[[Any, Any], None]] = {
    list: lambda container, items: container.__setitem__(slice(None), items),
    dict: _refill,
    set: _refill,
}
"""How to give a container the items that it had."""


class StepState(Rewind):
    """A step's beginning. The host waits for the device.

    Args:
        rank: whose step it is.
        forward_step: the trainer's `forward_step_func`.
    """

    def __init__(self, rank: Rank, forward_step: Callable[..., Any]) -> None:
        super().__init__(rank)
        self._rank = rank
        self.looked()
        self.keep()
        self._logged_ahead = {name: values.clone() for name, values in logged_ahead().items()}
        self._restore_random = saved_generators(rank.device)
        shared = places(forward_step, *rank.scale_functions)
        self._variables = [(place, place.read()) for place in shared]
        self._containers = [
            (value, copy.copy(value))
            for _, variables in self._variables
            for value in variables.values()
            if type(value) in _REFILLED
        ]
        self._replays = [
            (holder, {name: copy.copy(value) for name, value in vars(holder).items()})
            for model in rank.language_models
            for router in (routers(model).values() if rank.model.has_experts else ())
            for holder in (
                getattr(router, "routing_replay", None),
                getattr(router, "router_replay", None),
            )
            if holder is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back; may be called several times."""
        self.undo()
        for model in self._rank.models:
            for group in bucket_groups(model):
                group.reset()  # as Megatron's zero_grad_buffer does
        for name, total in logged_ahead().items():
            total.copy_(self._logged_ahead.get(name, torch.zeros_like(total)))
        self._restore_random()
        for place, variables in self._variables:
            current = place.read()
            for name, value in variables.items():
                if current.get(name, value) is not value:
                    place.write(name, value)
        for container, items in self._containers:
            _REFILLED[type(container)](container, items)
        for holder, attributes in self._replays:
            vars(holder).update({name: copy.copy(value) for name, value in attributes.items()})


def bucket_groups(model: Any) -> list[Any]:
    """Groups of buckets of Megatron's DDP around a model chunk; none of other wrappers."""
    if not hasattr(model, "ddp_config"):
        return []
    return [
        *getattr(model, "bucket_groups", ()), *getattr(model, "expert_parallel_bucket_groups", ())
    ]  # fmt: skip
