"""Random numbers that a model draws inside its call: copies of a prompt would draw different ones.

Noise of a hook, or dropout that is a function's, is no module's, so only the generators tell: their
states move.  On a GPU they also do in attention: transformer-engine takes a piece of the numbers
for dropout whether there is any or not (transformer_engine/pytorch/csrc/extensions/attention.cpp).
The state of a GPU's generator counts what was taken, so what core attention takes is subtracted; in
a fork of Megatron's tracker that may be from either, and all are added up.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron_prefix.device.modules import modules_of
from megatron_prefix.errors import UserError, refused
from megatron_prefix.refusals.table import MODEL_DRAWS

CPU, CUDA = "torch", "torch.cuda"
_COUNTED = 16
"""Bytes of the state of a GPU's generator: its seed, and how many numbers were taken."""


class RandomUse:
    """Notices random numbers that calls of models draw outside of core attention.

    Args:
        models: whose attention is left out.
        states: of the generators, by name, equal as long as nothing is drawn.
        taken: how many numbers were taken from the device's generators; None: it does not count.
        taken_here: the same of those that core attention of these models takes from.
    """

    def __init__(
        self,
        models: Iterable[Any],
        states: Callable[[], dict[str, Any]],
        taken: Callable[[], int] | None,
        taken_here: Callable[[], int] | None = None,
    ) -> None:
        self._states, self._taken = states, taken or (lambda: 0)
        self._taken_here = taken_here or self._taken
        attention = (
            module._modules.get("core_attention")
            for module in (() if taken is None else modules_of(*models))
        )
        self._cores = [module for module in attention if module is not None]
        self._inside = self._begin = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around all calls. What others have hooked on to attention counts, as it is outside."""
        hooks = [core.register_forward_pre_hook(self._enter) for core in self._cores]
        hooks += [core.register_forward_hook(self._leave, prepend=True) for core in self._cores]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def calling(self) -> Iterator[list[str]]:
        """Around a call; the names of generators that it has drawn from, when it has ended."""
        names: list[str] = []
        (before, begin), self._inside = self._read(), 0
        yield names
        now, end = self._read()
        names += sorted(name for name, state in now.items() if before.get(name) != state)
        if end - begin != self._inside:
            names.append(CUDA)

    def _read(self) -> tuple[dict[str, Any], int]:
        return self._states(), self._taken()

    def _enter(self, *_: Any) -> None:
        if not _is_capturing():  # when no state can be read
            self._begin = self._taken_here()

    def _leave(self, *_: Any) -> None:
        if not _is_capturing():
            self._inside += self._taken_here() - self._begin


class SegmentRandomUse(RandomUse):
    """Notices segments that draw random numbers.

    Attributes:
        undo: makes generators what they were before the first segment.
    """

    def __init__(self, models: Iterable[Any], device: torch.device) -> None:
        super().__init__(
            models, lambda: not_counted(device),
            (lambda: taken(device)) if counts_taken(device) else None,
            # A segment's attention (layers/blocks/core.py) enters no fork.
            lambda: _count(torch.cuda.get_rng_state(device)),
        )  # fmt: skip
        self.problem: UserError | None = None
        self.undo = saved_generators(device)

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Around the forward of a segment; the host does not wait for the device."""
        with self.calling() as names:
            yield
        if names and self.problem is None:
            self.problem = refused(MODEL_DRAWS, ", ".join(names))


def counts_taken(device: torch.device) -> bool:
    """Whether states of a device's generators say how many numbers were taken."""
    return device.type == "cuda" and torch.cuda.get_rng_state(device).numel() == _COUNTED


def torch_states(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators, and of those of Megatron's tracker, by name."""
    states = {CPU: torch.get_rng_state()}
    if device.type == "cuda":
        states[CUDA] = torch.cuda.get_rng_state(device)
    for name, state in get_cuda_rng_tracker().get_states().items():
        # A generator where it is safe for CUDA graphs.
        states[f"Megatron's {name}"] = state if isinstance(state, Tensor) else state.get_state()
    return states


def taken(device: torch.device) -> int:
    """How many numbers were taken from a device's generator and from those of the tracker."""
    return sum(_count(state) for name, state in torch_states(device).items() if name != CPU)


def not_counted(device: torch.device) -> dict[str, bytes]:
    """Those of `torch_states` that do not say how many were taken."""
    is_counted = device.type == "cuda"
    states = {CPU: torch.get_rng_state()} if is_counted else torch_states(device)
    return {name: state.numpy().tobytes() for name, state in states.items()}


def _count(state: Tensor) -> int:
    return int.from_bytes(state.numpy()[_COUNTED // 2 :].tobytes(), "little")


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class HostGenerators:
    """The global generators of the host, from which a data iterator may draw.

    A step that is made twice draws from iterators once. So that the second time leaves the
    generators as drawing would, their states after each draw are kept.
    """

    def __init__(self) -> None:
        self._last = self._now()

    def moved(self) -> list[Callable[[], None]]:
        """What sets those that have moved since this was asked to where they are now."""
        before, self._last = self._last, self._now()
        setters: tuple[Callable[..., None], ...] = (
            torch.set_rng_state, random.setstate, np.random.set_state,
        )  # fmt: skip
        states = zip(setters, before, self._last, strict=True)
        return [functools.partial(put, new) for put, (old, _), (mark, new) in states if old != mark]

    def _now(self) -> list[tuple[Any, Any]]:
        """What tells the state of each, and the state."""
        of_torch, of_python = torch.get_rng_state(), random.getstate()
        of_numpy: Any = np.random.get_state()
        mark = of_numpy[1].tobytes(), of_numpy[2:]
        return [(of_torch.numpy().tobytes(), of_torch), (of_python, of_python), (mark, of_numpy)]


def saved_generators(device: torch.device) -> Callable[[], None]:
    """Sets the generators that a step may draw from back to where they are now."""
    states: list[Callable[[], Any]] = [
        functools.partial(torch.set_rng_state, torch.get_rng_state()),
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),
    ]
    if device.type == "cuda":
        now = torch.cuda.get_rng_state(device)
        states.append(functools.partial(torch.cuda.set_rng_state, now, device))
    tracker = get_cuda_rng_tracker()
    if tracker.is_initialized():
        states.append(functools.partial(_set_tracker, tracker, _copies(tracker.get_states())))

    def restore() -> None:
        for put_back in states:
            put_back()

    return restore


def _copies(states: dict[str, Any]) -> dict[str, Any]:
    return {
        name: state.clone() if isinstance(state, Tensor) else state.clone_state()
        for name, state in states.items()
    }


def _set_tracker(tracker: Any, states: dict[str, Any]) -> None:
    for name, state in states.items():
        held = tracker.states_[name]
        if isinstance(held, Tensor):
            tracker.states_[name] = state.clone()
        else:
            held.set_state(state.get_state())
