"""A trainer's forward step, suspended in its model call and resumed with the answer.

A forward step runs on a greenlet: its own stack on the same thread.  What Python and torch keep per
thread (whether gradients are on, autocast, the current device and stream) would leak out of a
suspended step, so it is put back at every suspension and set again at every resumption: settings
that a forward step makes around its model call nest as they do in a plain call.

greenlet is a dependency because threads, the other way, break what Megatron keeps in one thread
(the tracker of CUDA random states) and take four times as long (benchmarks/suspend_steps.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import greenlet
import torch
from torch.overrides import _get_current_function_mode_stack  # what a `with` has pushed
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megatron_prefix.errors import refused
from megatron_prefix.refusals.table import FP8_INSIDE, NO_CALL, TORCH_MODES

DEVICE_TYPES = ("cpu", "cuda")
_QUANTISING = ("quantization", "fp8")  # modules of transformer-engine, new and old name
_running: SuspendedStep | None = None


def running() -> SuspendedStep | None:
    """The forward step whose code runs now; None outside of all."""
    return _running


class Settings(NamedTuple):
    """What torch keeps per thread and a forward step may change around its model call.

    Attributes:
        grad: whether gradients are recorded.
        autocast: by device type whether it is on, and its dtype.
        cache_enabled: autocast's cache of weights.
        stream: the current CUDA stream, which names its device; None without CUDA.
    """

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    cache_enabled: bool
    stream: Any

    @classmethod
    def now(cls) -> Settings:
        """The settings of this moment."""
        autocast = tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in DEVICE_TYPES
        )
        is_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(),
            torch.cuda.current_stream() if is_cuda else None,
        )  # fmt: skip

    @contextlib.contextmanager
    def autocasting(self) -> Iterator[None]:
        """Autocast as in these settings, and after it as before."""
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


def _fixed() -> tuple[Any, ...]:
    """Settings that cannot be taken off a step and put back."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (
        tuple(map(id, _get_current_function_mode_stack())),
        tuple(map(id, _get_current_dispatch_mode_stack())),
        torch.is_inference_mode_enabled(),
        None if hooks is None else id(hooks[0]),
    )


Swap = Callable[[Any, bool], Any]
"""Exchanges a step's own state of something for the present one: (state, entering) -> state.

Called whenever the step is entered or left, with what it returned the last time, at first with
None; see forward_step_state.py.
"""


class SuspendedStep:
    """One call of a trainer's `forward_step_func`.

    Args:
        function: runs the forward step and returns what it returns.
        model: the language model whose call suspends it.
        states: what else is put back when it is suspended.
        number: of the trainer's microbatch.

    Attributes:
        call: what the model was called with; None before.
        goes_on_itself: whether it was resumed with the model itself, which it may call again.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        model: Any,
        states: tuple[Swap, ...] = (),
        number: int = 0,
    ) -> None:
        self.model, self.number = model, number
        self.call: Any = None
        self._stock: Any = None
        self.goes_on_itself = False
        self._states, self._kept = states, [None] * len(states)
        self._settings: Settings | None = None
        self._called: Settings | None = None
        self._greenlet = greenlet.greenlet(function)
        self._greenlet.gr_context = contextvars.copy_context()

    @property
    def called(self) -> Settings:
        """The settings that the model was called with."""
        if self._called is None:
            raise RuntimeError("the forward step has not called the model")
        return self._called

    @property
    def changes_training(self) -> bool:
        """Whether the model is in another mode than outside: train() or eval()."""
        return bool(self._kept) and self._kept[0] is not None

    def start(self) -> None:
        """Runs the forward step up to its model call.

        Raises:
            UserError: it ends without a call, or changes what cannot be put back.
        """
        self._switch(self._greenlet.switch)
        if self._greenlet.dead:
            raise refused(NO_CALL)

    def pause(self, call: Any, stock: Callable[[], Any]) -> Any:
        """Suspends the step, which runs now; what it is resumed with, called, is the result.

        Args:
            call: what the model is called with.
            stock: runs the model itself.
        """
        self.call, self._stock, self._called = call, stock, Settings.now()
        if quantises() and not self._quantised:
            raise refused(FP8_INSIDE)
        if _fixed() != self._before:
            raise refused(TORCH_MODES)
        return self._greenlet.parent.switch()()

    def resume(self, answer: Callable[[], Any]) -> Any:
        """Goes on from the model call to the end.

        Args:
            answer: called under the settings of the model call; its result is the model's.

        Returns:
            What the forward step returns.
        """
        return self._switch(lambda: self._greenlet.switch(answer))

    def run_model(self) -> Any:
        """Goes on with the model itself, as if nobody had looked; see `resume`."""
        self.goes_on_itself = True
        stock, self._stock, self.call = self._stock, None, None  # with the arguments they hold
        return self.resume(stock)

    def close(self) -> None:
        """Ends a step that is still suspended; its `finally` blocks run."""
        if self._greenlet and not self._greenlet.dead:
            self._switch(lambda: self._greenlet.throw(greenlet.GreenletExit))

    def _switch(self, switch: Callable[[], Any]) -> Any:
        """Runs the step until it is suspended or ends."""
        global _running
        outside, around = Settings.now(), _running
        self._before, self._quantised = _fixed(), quantises()
        self._greenlet.parent = greenlet.getcurrent()
        if self._settings is not None:
            self._settings.apply()
        self._swap(entering=True)
        _running = self
        try:
            return switch()
        finally:
            _running = around
            self._settings = Settings.now()
            outside.apply()
            self._swap(entering=False)

    def _swap(self, *, entering: bool) -> None:
        pairs = zip(self._states, self._kept, strict=True)
        self._kept = [swap(kept, entering) for swap, kept in pairs]
