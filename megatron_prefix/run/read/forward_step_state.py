"""What a forward step may change around its model call: settings of torch, a model, Megatron.

What Python and torch keep per thread would leak out of a suspended step (`Settings`). The rest is a
`Swap` each: it puts what a suspended step has changed out of the way, and back when the step goes
on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import _get_current_function_mode_stack  # what a `with` has pushed
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megatron_prefix.device.modules import modules_of

DEVICE_TYPES = ("cpu", "cuda")
_QUANTISING = ("quantization", "fp8")  # modules of transformer-engine, new and old name

Swap = Callable[[Any, bool], Any]
"""Exchanges a step's own state of something for the present one: (state, entering) -> state.

Called whenever the step is entered or left, with what it returned the last time, at first with
None.
"""


class Settings(NamedTuple):
    """What torch keeps per thread and a forward step may change around its model call.

    Attributes:
        autocast: by device type whether it is on, and its dtype.
        stream: the current CUDA stream, which names its device; None without CUDA.
    """

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    cache_enabled: bool
    stream: Any

    @classmethod
    def now(cls) -> Settings:
        autocast = tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in DEVICE_TYPES
        )
        return cls(
            torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(),
            torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        )  # fmt: skip

    @contextlib.contextmanager
    def autocasting(self) -> Iterator[None]:
        outside = Settings.now()
        outside._replace(autocast=self.autocast, cache_enabled=self.cache_enabled).apply()
        try:
            yield
        finally:
            outside.apply()
            if any(is_on for is_on, _ in self.autocast):
                torch.clear_autocast_cache()  # of weights, as at the end of `torch.autocast`

    def apply(self) -> None:
        """Makes these the settings; work on the stream waits for what the last one has to do."""
        before = Settings.now()
        torch.set_grad_enabled(self.grad)
        for kind, (is_on, dtype) in zip(DEVICE_TYPES, self.autocast, strict=True):
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)
        if self.stream is not None and self.stream != before.stream:
            torch.cuda.set_stream(self.stream)  # and its device
            if before.stream is not None:
                self.stream.wait_stream(before.stream)


def quantises() -> bool:
    """Whether transformer-engine's autocast to fp8 or fp4 is on: one for the whole process."""
    modules = (sys.modules.get(f"transformer_engine.pytorch.{name}") for name in _QUANTISING)
    managers = (getattr(module, "FP8GlobalStateManager", None) for module in modules)
    return any(manager is not None and manager.is_fp8_enabled() for manager in managers)


def fixed() -> tuple[Any, ...]:
    """Settings of torch that cannot be taken away from a step and put back."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (
        tuple(map(id, _get_current_function_mode_stack())),
        tuple(map(id, _get_current_dispatch_mode_stack())),
        torch.is_inference_mode_enabled(),
        None if hooks is None else id(hooks[0]),
    )


def _whole_state(read: Callable[[], Any], write: Callable[[Any], None]) -> Swap:
    """Of something that is read and written as a whole; None where a step leaves it as it was."""
    outside = read()

    def swap(state: Any, entering: bool) -> Any:
        if entering and state is None:
            return None
        inside = read()
        changed = inside != outside
        if changed or state is not None:
            write(outside if state is None else state)
        return inside if changed else None

    return swap


def training_modes(model: Any) -> Swap:
    """`train()` and `eval()` of a model and of its parts."""
    modules = list(modules_of(model))

    def write(flags: list[bool]) -> None:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag

    return _whole_state(lambda: [module.training for module in modules], write)


def environment() -> Swap:
    """Variables of the environment: slime tells its routers by one what a call is for."""
    # Private: the public way decodes every variable, twice per microbatch.
    encoded = os.environ._data  # type: ignore[attr-defined]

    def write(variables: dict[bytes, bytes]) -> None:
        os.environ.clear()
        os.environ.update({os.fsdecode(n): os.fsdecode(value) for n, value in variables.items()})

    return _whole_state(lambda: dict(encoded), write)


@contextlib.contextmanager
def watched_forks() -> Iterator[Swap]:
    """Forks of Megatron's tracker of random states that a step is inside of.

    A fork puts another state into the generator, and at its end the one that was there.  For a
    suspended step the generator gets back what was there before its outermost fork, and the forks
    end with what the generator has by then.
    """
    tracker, forks = megatron_random.get_cuda_rng_tracker(), []  # type: ignore[var-annotated]
    stock, before = tracker.fork, vars(tracker).get("fork")

    @contextlib.contextmanager
    def fork(*args: Any, **kwargs: Any) -> Iterator[None]:
        forks.append((_cuda_state(tracker), _mode_name(tracker)))
        before = forks[-1]
        try:
            with stock(*args, **kwargs):
                yield
        finally:
            outside = forks.pop()
            if outside is not before:  # it was suspended inside
                _set(tracker, *outside)

    def swap(state: list[Any] | None, entering: bool) -> list[Any] | None:
        inside = [*forks, (_cuda_state(tracker), _mode_name(tracker))] if forks else None
        outside = forks[0] if forks else None
        forks.clear()
        if state:
            forks[:] = [(_cuda_state(tracker), _mode_name(tracker)), *state[1:-1]]
            outside = state[-1]
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


def _cuda_state(tracker: Any) -> Any:
    return megatron_random._get_cuda_rng_state(graph_safe=_graph_safe(tracker))


def _set(tracker: Any, state: Any, name: str | None) -> None:
    megatron_random._set_cuda_rng_state(state, graph_safe=_graph_safe(tracker))
    if name is not None:
        tracker._current_state_name = name


def _mode_name(tracker: Any) -> str | None:
    return getattr(tracker, "_current_state_name", None)


def _graph_safe(tracker: Any) -> bool:
    return getattr(tracker, "use_cudagraphable_rng", False)
