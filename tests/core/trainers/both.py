"""A schedule that runs every step twice, stock and prefix, and keeps how far they are apart.

A trainer that gets it instead of Megatron's runs as it always does: its own data iterator,
forward step and loss, first under the stock schedule and then under the prefix schedule. It goes on
with the gradients and the results of the second.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.schedule import get_forward_backward_func

CONFIG = PrefixConfig(min_gain=0, segment_tokens=128, chunk_tokens=32, kernel="math")
"""Small segments, so that small steps have many; the kernel without probing."""


@dataclass
class Step:
    """One call of the schedule.

    Attributes:
        kind: "update", or "forward" for a pass without gradients.
        executed: tokens that ran through the model; of `raw`, what the stock schedule runs.
        limit: what the numerics policy allows the differences, in fp32.
        gradient: largest difference of a gradient, relative to the largest element of its
            parameter, or to a hundredth of the largest of all where that is more.
        results: largest difference of what the schedule returned, likewise.
        scored: positions that went through the output layer.
    """

    kind: str
    executed: int
    raw: int
    limit: float
    gradient: float
    results: float
    scored: int = 0

    @property
    def problem(self) -> str:
        """What is wrong; "" for nothing."""
        if not (self.gradient <= self.limit and self.results <= self.limit):
            return (
                f"{self.kind}: gradients differ by {self.gradient:.1e}, results by"
                f" {self.results:.1e}; allowed are {self.limit:.1e}"
            )
        if not self.executed < 0.9 * self.raw:
            return f"{self.kind}: {self.executed} of {self.raw} tokens ran: nothing was shared"
        return ""


@dataclass
class Both:
    """Takes the place of `get_forward_backward_func`; calling it gives the schedule.

    Attributes:
        config: of the prefix schedule.
        trained: see `get_forward_backward_func`.
        samples: likewise.
        swapped: what has taken Megatron's place; its schedule runs, not that of `config`.
        steps: what was seen of every step.
    """

    config: PrefixConfig = CONFIG
    trained: Callable[..., Any] | None = None
    samples: Callable[..., Any] | None = None
    swapped: Callable[..., Any] | None = None
    steps: list[Step] = field(default_factory=list)

    def __call__(self, *_: Any, **__: Any) -> Callable[..., Any]:
        """The schedule."""
        return self._run

    def _run(self, *, data_iterator: Any, model: Any, **arguments: Any) -> Any:
        chunks = model if isinstance(model, list) else [model]
        first, second = twice(data_iterator)
        arguments["model"] = model
        expected = stock_schedule()(data_iterator=first, **arguments)
        wanted = gradients(chunks)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        ours = self.swapped or functools.partial(
            get_forward_backward_func, prefix_config=self.config, trained=self.trained,
            samples=self.samples,
        )  # fmt: skip
        schedule = ours()
        found = schedule(data_iterator=second, **arguments)
        forward_only = bool(arguments.get("forward_only"))
        forest = schedule.report.forest  # type: ignore[union-attr]
        self.steps.append(
            Step(
                "forward" if forward_only else "update",
                forest.executed_tokens, forest.raw_tokens,
                tolerance(torch.float32, max(forest.raw_tokens, 1)),
                0.0 if forward_only else furthest(gradients(chunks), wanted),
                furthest(flat(found), flat(expected)),
                sum(segment.num_read for segment in forest.segments),
            )
        )  # fmt: skip
        return found


def twice(iterator: Any) -> tuple[Any, Any]:
    """A data iterator for each schedule, over the same microbatches."""
    if isinstance(iterator, list):
        pairs = [twice(one) for one in iterator]
        return [one for one, _ in pairs], [other for _, other in pairs]
    if iterator is None:
        return None, None
    if hasattr(iterator, "__next__"):  # Megatron-LM's has no __iter__
        pair = itertools.tee(iter(iterator.__next__, object()))
        # pretrain_gpt of 0.19 puts this rank's slices into the dict that it gets.
        first, second = (map(_own, one) for one in pair)
        return first, second
    return copy.copy(iterator), iterator  # a place in a list, as slime has it


def _own(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, dict) else batch


def gradients(chunks: list[Any]) -> dict[str, Tensor]:
    """Copies of all gradients of a rank."""
    return {
        f"{number}.{name}": parameter.main_grad.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def flat(results: Any, name: str = "") -> dict[str, Tensor]:
    """Every number in what a schedule returns, by its place."""
    if isinstance(results, Tensor):
        return {name: results.values() if results.is_nested else results}
    if isinstance(results, bool) or not isinstance(results, int | float | Mapping | list | tuple):
        return {}
    if isinstance(results, int | float):
        return {name: torch.tensor(float(results))}
    pairs = results.items() if isinstance(results, Mapping) else enumerate(results)
    found: dict[str, Tensor] = {}
    for key, value in pairs:
        found.update(flat(value, f"{name}/{key}"))
    return found


def furthest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference; infinite where something is missing or not finite."""
    if found.keys() != expected.keys():
        return math.inf
    sizes = [float(value.abs().max()) for value in expected.values() if value.numel()]
    if not sizes:
        return 0.0
    floor, worst = 0.01 * max(sizes), 0.0
    for name, value in expected.items():
        other = found[name]
        if other.shape != value.shape or not (other.isfinite().all() and value.isfinite().all()):
            return math.inf
        if value.numel() and (scale := max(float(value.abs().max()), floor)):
            worst = max(worst, float((other.double() - value.double()).abs().max()) / scale)
    return worst
