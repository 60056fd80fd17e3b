"""Random numbers that a model draws inside its call: copies of a prompt would draw different ones.

Noise of a hook, or dropout that is a function's, is no module's, so only the generators tell: their
states move.  They also do in attention: transformer-engine takes a piece of the generator's numbers
for dropout whether there is any or not (transformer_engine/pytorch/csrc/extensions/attention.cpp),
so what moves inside of core attention does not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron_prefix.device.modules import modules_of
from megatron_prefix.errors import refused
from megatron_prefix.refusals.table import MODEL_DRAWS

CPU, CUDA = "torch", "torch.cuda"
States = dict[str, Any]
"""By the name of a generator what is equal as long as nothing is drawn from it."""


class Draws:
    """Tells whether models draw outside of core attention.

    Args:
        models: whose attention is left out.
        read: the states of the generators.
        inside: those of them that may move inside core attention.
    """

    def __init__(
        self, models: Iterable[Any], read: Callable[[], States], inside: Callable[[], States]
    ) -> None:
        attention = (module._modules.get("core_attention") for module in modules_of(*models))
        self._cores = [module for module in attention if module is not None]
        self._read, self._inside = read, inside
        self._last: States = {}
        self._drawn: set[str] = set()

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
        self._last = self._read()
        self._drawn.clear()
        yield names
        self._compare(self._read())
        names += sorted(self._drawn)

    def _compare(self, now: States) -> None:
        self._drawn |= {name for name, state in now.items() if self._last.get(name) != state}

    def _enter(self, *_: Any) -> None:
        if not _is_capturing():  # where no state can be read
            self._compare(self._inside())

    def _leave(self, *_: Any) -> None:
        if not _is_capturing():
            self._last.update(self._inside())


class SegmentDraws:
    """Refuses a step whose segments draw, with the generators as they were before the first."""

    def __init__(self, models: Iterable[Any], device: torch.device) -> None:
        self._device = device
        self._before = generators(device)
        inside = {CUDA: self._offset} if device.type == "cuda" else {}
        self._draws = Draws(
            models if inside else (), self._states,
            lambda: {name: read() for name, read in inside.items()},
        )  # fmt: skip

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Around all segments."""
        return self._draws.watching()

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Around the forward of a segment.

        Raises:
            CannotShare: it has drawn.
        """
        with self._draws.calling() as names:
            yield
        if names:
            put_back(self._before, self._device)
            raise refused(MODEL_DRAWS, ", ".join(names))

    def _states(self) -> States:
        """Without waiting for the device: its generator's state is the host's."""
        states: States = {CPU: torch.get_rng_state().numpy().tobytes()}
        if self._device.type == "cuda":
            states[CUDA] = self._offset()
        for name, state in get_cuda_rng_tracker().get_states().items():
            states[f"Megatron's {name}"] = _state(state).numpy().tobytes()
        return states

    def _offset(self) -> bytes:
        return torch.cuda.get_rng_state(self._device).numpy().tobytes()


def generators(device: torch.device) -> States:
    """States of torch's generators and of Megatron's tracker, to put back."""
    states: States = {CPU: torch.get_rng_state()}
    if device.type == "cuda":
        states[CUDA] = torch.cuda.get_rng_state(device)
    tracked = get_cuda_rng_tracker().get_states()
    return states | {f"Megatron's {name}": _state(one).clone() for name, one in tracked.items()}


def put_back(states: States, device: torch.device) -> None:
    """Makes generators what they were."""
    torch.set_rng_state(states[CPU])
    if CUDA in states:
        torch.cuda.set_rng_state(states[CUDA], device)
    tracker = get_cuda_rng_tracker()
    tracked = tracker.get_states()
    for name, state in tracked.items():
        before = states.get(f"Megatron's {name}")
        if before is not None and isinstance(state, Tensor):
            tracked[name] = before
        elif before is not None:
            state.set_state(before)
    tracker.set_states(tracked)


def _state(state: Any) -> Tensor:
    """Of the tracker's: a tensor, or a generator where it is safe for CUDA graphs."""
    found: Tensor = state if isinstance(state, Tensor) else state.get_state()
    return found


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
