"""Trainers that scale the losses of each microbatch by another number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.lab.models.build import unwrap
from tests.harness.steps import Contract, Microbatch

WAYS = ("before", "after", "in loss", "calls")
"""When the number is set: before the model call or after it, in the loss; or by the scale function
itself, which counts its calls."""


@dataclass(frozen=True)
class Varying(Contract):
    """As `Contract`, with functions that scale losses by what is set for each microbatch.

    Attributes:
        way: of WAYS; or "tensor": before the model call, in place.
        state: what the trainer and its functions share.
    """

    way: str = "before"
    state: Any = field(default_factory=SimpleNamespace, compare=False, repr=False)

    def configure(self, model: Any) -> None:
        """See Contract."""
        super().configure(model)
        config, state = unwrap(model).config, self.state
        state.scale, state.tensor, state.called = 1.0, torch.ones(()), []
        config.grad_scale_func = self.scaled
        if hasattr(config, "moe_grad_scale_func"):
            config.moe_grad_scale_func = functools.partial(self.of_losses, "moe", 2.0)
            config.mtp_grad_scale_func = functools.partial(self.of_losses, "mtp", 3.0)

    def scaled(self, loss: Tensor) -> Tensor:
        """A `grad_scale_func`."""
        return loss * self.now("grad")

    def of_losses(self, name: str, factor: float) -> Tensor:
        """A `moe_grad_scale_func`, or of multi-token prediction."""
        return torch.tensor([factor * self.now(name)])

    def now(self, name: str) -> float:
        """The number now; calls are noted."""
        called = self.state.called
        called.append((name, self.state.scale))
        if self.way == "calls":
            return 0.5 + len(called) % 5
        return float(self.state.tensor) if self.way == "tensor" else self.state.scale

    def step(self, data_iterator: Iterator[Microbatch], model: Any) -> Any:
        """See Contract."""
        batch, state = next(data_iterator), self.state
        number = 0.5 + (batch["uid"] * 7 % 5)
        if self.way == "before":
            state.scale = number
        if self.way == "tensor":
            state.tensor.fill_(number)
        output, loss_func = super().step(iter([batch]), model)
        if self.way == "after":
            state.scale = number
        return output, functools.partial(self.loss, loss_func, number)

    def loss(self, stock: Callable[..., Any], number: float, *args: Any, **named: Any) -> Any:
        """A loss function."""
        if self.way == "in loss":
            self.state.scale = number
        return stock(*args, **named)
