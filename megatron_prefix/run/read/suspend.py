"""The trainer's forward steps of one schedule call, suspended in their model calls.

Each is run once for each of its microbatches on every model chunk, as the stock schedule has it,
and suspended where it calls the model.  Then it is resumed with an answer that is made of segments,
or it goes on with the model itself: that is the stock schedule.

A forward step runs on a greenlet: its own stack on the same thread.  What it changes around its
model call (forward_step_state.py) is put back at every suspension and set again at every
resumption, so that it nests as in a plain call.

A forward step may call the model without gradients beside that: a preference loss wants log-probs
of a reference, and trainers with adapters get them from the model itself, adapters off (ms-swift's
DPO and KTO).  Such a call is the stock model's, in its place: what the trainer has switched for it
is as it left it.

greenlet is a dependency because threads, the alternative, break what Megatron keeps in one thread
(the tracker of CUDA random states) and take four times as long (benchmarks/suspend_steps.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import greenlet
import torch

from megatron_prefix.errors import DataEnded, UserError, refused
from megatron_prefix.megatron.install import intercepted
from megatron_prefix.parts import StepPart
from megatron_prefix.refusals.table import (
    DIFFERENT_AUTOCAST,
    FORWARD_COUNTS,
    FP8_AROUND,
    FP8_INSIDE,
    NO_CALL,
    TORCH_MODES,
    TRAINING_MODE,
    TWO_CALLS,
)
from megatron_prefix.run.calls import ModelCall, bound
from megatron_prefix.run.read import forward_step_state
from megatron_prefix.run.read.data_iterators import observed, single
from megatron_prefix.run.read.forward_step_state import Settings, Swap, fixed, quantises
from megatron_prefix.run.read.loss_variables import LossVariables
from megatron_prefix.run.read.model_state import ModelState, StateOfSteps, outer_modules
from megatron_prefix.run.request import Request

_running: SuspendedStep | None = None


def running() -> SuspendedStep | None:
    """The forward step whose code runs now; None outside of all."""
    return _running


class SuspendedStep:
    """One call of a trainer's `forward_step_func`.

    Args:
        states: what else is put back when it is suspended.

    Attributes:
        notes: what each part has noted; it goes when the step goes on with the model itself.
        kept: what of each of `states` is the step's own while it is suspended; None: nothing. The
            first one is the model's mode, train() or eval().
        twice: what is in the way once it has called the model again, with gradients; the second
            call was answered as the first, and what comes of it must not be used.
        goes_on_itself: whether it was resumed with the model itself, which it may call again.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        model: Any,
        states: tuple[Swap, ...] = (),
        number: int = 0,
        chunk: int = 0,
        parts: Sequence[StepPart] = (),
    ) -> None:
        self.model, self.number, self.chunk, self._parts = model, number, chunk, parts
        self.notes: dict[StepPart, Any] = {}
        self.call: Any = None
        self.called: Settings
        self._stock: Any = None
        self._problem: UserError | None = None
        self.twice: UserError | None = None
        self._answer: Callable[[], Any] | None = None
        self._result: Any = None
        self.goes_on_itself = False
        self._states, self.kept = states, [None] * len(states)
        self._settings: Settings | None = None
        self._greenlet = greenlet.greenlet(function)
        self._greenlet.gr_context = contextvars.copy_context()

    @property
    def below(self) -> FrameType | None:
        """The stack that waits while the step's own one runs."""
        return self._greenlet.parent.gr_frame  # type: ignore[no-any-return]

    def start(self) -> None:
        """Runs the forward step up to its model call.

        Raises:
            CannotShare: it has run to its end, without a call or since it cannot be suspended;
                `run_model` has what it returned.
        """
        self._result = self._switch(self._greenlet.switch)
        if self._greenlet.dead:
            self._swap(entering=True)  # as for a step that goes on to its end
            self._swap(entering=False)
            raise self._problem or refused(NO_CALL)

    def pause(self, call: Any, stock: Callable[[], Any]) -> Any:
        """Suspends the step, which runs now; what it is resumed with, called, is the result."""
        self.call, self._stock, self.called = call, stock, Settings.now()
        self.notes = {part: part.suspended(self) for part in self._parts}
        if quantises() and not self._quantised:
            self._problem = refused(FP8_INSIDE)
        elif fixed() != self._before:
            self._problem = refused(TORCH_MODES)
        if self._problem is not None:
            if not getattr(self.model, "pre_process", True):
                raise self._problem  # behind the first stage the model has no input yet
            self.goes_on_itself = True
            return stock()
        return self._greenlet.parent.switch()()

    def resume(self, answer: Callable[[], Any]) -> Any:
        """Goes on from the model call to the end.

        Args:
            answer: called under the settings of the model call; its result is the model's.

        Returns:
            What the forward step returns.
        """
        self._answer = answer
        try:
            return self._switch(lambda: self._greenlet.switch(answer))
        finally:
            self._answer = None

    def answer_again(self) -> Any:
        """A second call of the model is answered as the first: the trainer's code goes on to what
        other ranks wait for in it, and the step is undone when all of it has run."""
        self.twice = refused(TWO_CALLS)
        if self._answer is None:
            raise self.twice
        return self._answer()

    def run_model(self) -> Any:
        """Goes on with the model itself, as if the call had never been caught; see `resume`."""
        if self._greenlet.dead:
            result, self._result = self._result, None
            return result
        self.goes_on_itself = True
        stock, self._stock, self.call = self._stock, None, None  # with the arguments they hold
        self.notes = {}
        return self.resume(stock)

    def close(self) -> None:
        if self._greenlet and not self._greenlet.dead:
            self._switch(lambda: self._greenlet.throw(greenlet.GreenletExit))

    def _switch(self, switch: Callable[[], Any]) -> Any:
        global _running
        outside, around = Settings.now(), _running
        self._before, self._quantised = fixed(), quantises()
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
        pairs = zip(self._states, self.kept, strict=True)
        self.kept = [swap(state, entering) for swap, state in pairs]


class Capture:
    """The forward steps of one schedule call, which are suspended inside of `running`.

    Args:
        data_iterator: what they draw from: one, or a list with one per model chunk; it may be
            anything, and stays as it is if it has no `__next__`.

    Attributes:
        steps: per model chunk the suspended forward steps in the trainer's order.
        is_broken: whether they cannot go on, since suspending them has failed.
        state: what they change of models before they call them.
        tokens: input_ids of the first chunk's calls, from `forget_arguments` on.
    """

    def __init__(self, request: Request, data_iterator: Any) -> None:
        rank, forward_step = request.rank, request.arguments["forward_step_func"]
        self._forward_step, self._rank = request.forward_step or forward_step, rank
        self._parts, self._takes_beside = request.parts, takes_beside(request)
        self._num: int = request.arguments["num_microbatches"]
        keeps_drawn = request.callbacks.needs_drawn(rank.forward_only)
        self._drawn: list[Any] | None = [] if keeps_drawn else None
        if self._drawn is not None:
            data_iterator = observed(data_iterator, self._drawn.append)
        several = isinstance(data_iterator, list)
        self._iterators = data_iterator if several else [data_iterator] * len(rank.models)
        self.steps: list[list[SuspendedStep]] = [[] for _ in rank.models]
        self.is_broken = False
        self.tokens: list[Any] = []
        self._loss_variables = variables = LossVariables(forward_step, *rank.scale_functions)
        self._left = [deque[SuspendedStep]() for _ in rank.models]
        models = [*rank.language_models, *rank.models]
        self.state = StateOfSteps(
            lambda: ModelState(models, len(rank.models), outer_modules(variables.places, models)),
            is_inside=request.runs_outside,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the schedule call, after which no forward step is suspended any more."""
        with contextlib.ExitStack() as stack:
            self._forks = stack.enter_context(forward_step_state.watched_forks())
            for model in self._rank.models:
                stack.enter_context(intercepted(model, self._intercepting))
            for part in self._parts:
                stack.enter_context(part.around_forward_steps(self))
            try:
                yield
            finally:
                with contextlib.ExitStack() as closing:  # all, whatever one of them raises
                    for step in itertools.chain(*self.steps):
                        closing.callback(step.close)
                self._loss_variables.end()
                for steps in (*self.steps, *self._left):
                    steps.clear()  # a circle, in which batches would wait for the collector

    def run(self) -> None:
        """Runs every forward step up to its model call.

        Raises:
            UserError: the data ends early.
            CannotShare: a forward step does not call the model, cannot be suspended there, or has
                changed the model for its call; then those after it have not begun.
        """
        environment = forward_step_state.environment()
        for chunk, model in enumerate(self._rank.language_models):
            of_parts = itertools.chain(*(part.swaps(chunk) for part in self._parts))
            modes, loss_variables = forward_step_state.training_modes(model), self._loss_variables
            # What models hold is last: behind their mode, which is put back.
            swaps = modes, environment, self._forks, loss_variables.swap, *of_parts, self.state.swap
            function = functools.partial(self._call, chunk)
            for number in range(self._num):
                step = SuspendedStep(function, model, swaps, number, chunk, self._parts)
                self.steps[chunk].append(step)
                self._left[chunk].append(step)
                try:
                    step.start()
                except StopIteration:
                    raise DataEnded(
                        f"the data iterator ended after {number} of {self._num} microbatches"
                    ) from None
                self.state.check(step.kept[-1])
                if self._drawn is not None:
                    step.call = replace(step.call, drawn=single(self._drawn))
                    self._drawn.clear()
        self.state.forget()

    def calls(self, chunk: int) -> list[ModelCall]:
        return [step.call for step in self.steps[chunk]]

    def check_settings(self) -> None:
        """Refuses calls under settings that segments, which stand for several, cannot have.

        Raises:
            CannotShare: autocast differs from call to call, or is one to fp8; the model is in
                another mode; or routers count in a call with forward_only.
        """
        if quantises():
            raise refused(FP8_AROUND)
        steps = list(itertools.chain(*self.steps))
        if len({step.called.autocast for step in steps}) > 1:
            raise refused(DIFFERENT_AUTOCAST)
        if any(step.kept and step.kept[0] is not None for step in steps):
            raise refused(TRAINING_MODE)
        if self._rank.counts_without_backward and any(step.called.grad for step in steps):
            raise refused(FORWARD_COUNTS)

    def forget_arguments(self) -> None:
        """Drops the tensors of all calls, once they are read, but for the tokens."""
        self.tokens = [step.call["input_ids"] for step in self.steps[0]]
        for step in itertools.chain(*self.steps):
            step.call = step.call.without_tensors()

    def stock_step(self, _: Any, model: Any) -> Any:
        """A `forward_step_func` for the stock schedule: the suspended steps go on, in order, and
        those that have not begun begin."""
        chunk = next(i for i, chunk_model in enumerate(self._rank.models) if chunk_model is model)
        if self._left[chunk]:
            return self._left[chunk].popleft().run_model()
        return self._forward_step(self._iterators[chunk], model)

    def _call(self, chunk: int) -> Any:
        """One of the trainer's forward steps, as in `forward_step` of
        megatron/core/pipeline_parallel/schedules.py."""
        config = self._rank.language_models[chunk].config
        autocast: Any = contextlib.nullcontext()
        if config.enable_autocast:
            autocast = torch.autocast("cuda", dtype=config.autocast_dtype)
        with autocast:
            return self._forward_step(self._iterators[chunk], self._rank.models[chunk])

    def _intercepting(self, model: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(stock)

        def forward(*args: Any, **kwargs: Any) -> Any:
            step = running()
            if step is None or step.model is not model or step.goes_on_itself:
                return stock(*args, **kwargs)
            if self._takes_beside and is_beside(model, called=step.call is not None):
                with self.state.own():
                    return stock(*args, **kwargs)
            if step.call is not None:
                return step.answer_again()
            call = bound(signature, args, kwargs, step.number)
            return step.pause(call, lambda: stock(*args, **kwargs))

        return forward


def takes_beside(request: Request) -> bool:
    """Whether forward steps of a call of the schedule may call the model without gradients, too.

    Without gradients nothing tells a microbatch's own call from another. Behind the first pipeline
    stage a call's input is what the stage before it has sent, which segments do not send.
    """
    rank = request.rank
    is_only_chunk = len(rank.models) == 1 and rank.num_stages == 1
    counted = any(part.counts_calls for part in request.parts)
    return is_only_chunk and not counted and not rank.forward_only and torch.is_grad_enabled()


def is_beside(model: Any, *, called: bool) -> bool:
    """Whether a call of a language model, in a forward step that may make such calls, is one.

    Args:
        called: whether the step has made its own call. What follows that runs in another order on
            every rank, and ranks that share experts would wait for one another.
    """
    apart = not called or model.config.expert_model_parallel_size == 1
    return apart and not torch.is_grad_enabled()
