"""The trainer's forward steps of one schedule call, suspended in their model calls.

Each is run once for each of its microbatches on every model chunk, as the stock schedule has it,
and suspended where it calls the model.  Then it is answered from segments, or it goes on with the
model itself: that is the stock schedule.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_prefix.errors import UserError, refused
from megatron_prefix.megatron.install import intercepted
from megatron_prefix.moe import versions
from megatron_prefix.refusals.table import DIFFERENT_AUTOCAST, FP8_AROUND, TRAINING_MODE, TWO_CALLS
from megatron_prefix.run import calls, forward_step_state, suspend
from megatron_prefix.run.loss_variables import LossVariables
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.samples import RecordingIterator
from megatron_prefix.run.suspend import SuspendedStep


class Capture:
    """The forward steps of one schedule call; use it as a context manager.

    Args:
        forward_step: the trainer's `forward_step_func`.
        data_iterator: the trainer's, one or a list of one a model chunk; it may be anything.
        rank: with the model chunks that they call.
        num_microbatches: of the trainer on this rank.
        keeps_drawn: whether model calls keep what their forward step drew; iterators that have no
            `__next__` stay as they are.

    Attributes:
        steps: per model chunk the suspended forward steps in the trainer's order.
    """

    def __init__(
        self,
        forward_step: Callable[..., Any],
        data_iterator: Any,
        rank: Rank,
        num_microbatches: int,
        keeps_drawn: bool = False,
    ) -> None:
        self._forward_step, self._rank = forward_step, rank
        self._num = num_microbatches
        many = isinstance(data_iterator, list)
        given = data_iterator if many else [data_iterator]
        if keeps_drawn:
            given = [RecordingIterator(one) if hasattr(one, "__next__") else one for one in given]
        self._iterators = given if many else given * len(rank.models)
        self.steps: list[list[SuspendedStep]] = [[] for _ in rank.models]
        self._stack, self._loss_variables = contextlib.ExitStack(), LossVariables(forward_step)
        self._left = [deque[SuspendedStep]() for _ in rank.models]

    def __enter__(self) -> Capture:
        with contextlib.ExitStack() as stack:
            self._forks = stack.enter_context(forward_step_state.watched_forks())
            for model in self._rank.models:
                stack.enter_context(intercepted(model, _intercepting))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            self.close()
            self._loss_variables.end()

    def close(self) -> None:
        """Ends every forward step that is still suspended, the last one first."""
        with contextlib.ExitStack() as stack:  # all of them, whatever one of them raises
            for steps in self.steps:
                for step in steps:
                    stack.callback(step.close)

    def run(self) -> None:
        """Runs every forward step up to its model call.

        Raises:
            UserError: the data ends early, or a forward step does not call the model.
        """
        environment = forward_step_state.environment()
        for chunk, model in enumerate(self._rank.language_models):
            swaps = [
                forward_step_state.training_modes(model),
                environment,
                self._forks,
                self._loss_variables.swap,
            ]
            if self._rank.has_experts:
                routers = [*versions.routers(model).values()]
                swaps.append(forward_step_state.replayed_routes(routers))
            for number in range(self._num):
                step = SuspendedStep(self._function(chunk), model, tuple(swaps), number)
                self.steps[chunk].append(step)
                try:
                    step.start()
                except StopIteration:
                    raise UserError(
                        f"the data iterator ended after {number} of {self._num} microbatches"
                    ) from None
                if isinstance(iterator := self._iterators[chunk], RecordingIterator):
                    step.call = replace(step.call, drawn=iterator.taken())
            self._left[chunk] = deque(self.steps[chunk])

    def calls(self, chunk: int) -> list[calls.ModelCall]:
        """The model calls of a chunk, in the trainer's order."""
        return [step.call for step in self.steps[chunk]]

    def check_settings(self) -> None:
        """Refuses calls under settings that segments, which stand for several, cannot have.

        Raises:
            CannotShare: autocast differs from call to call, or is one to fp8; or the model is in
                another mode.
        """
        if suspend.quantises():
            raise refused(FP8_AROUND)
        steps = list(itertools.chain(*self.steps))
        if len({step.called.autocast for step in steps}) > 1:
            raise refused(DIFFERENT_AUTOCAST)
        if any(step.changes_training for step in steps):
            raise refused(TRAINING_MODE)

    def forget_arguments(self) -> None:
        """Drops the tensors of all calls, once they are read."""
        for step in itertools.chain(*self.steps):
            step.call = step.call.without_tensors()

    def stock_step(self, _: Any, model: Any) -> Any:
        """A `forward_step_func` for the stock schedule: the suspended steps go on, in order."""
        chunk = next(i for i, one in enumerate(self._rank.models) if one is model)
        return self._left[chunk].popleft().run_model()

    def _function(self, chunk: int) -> Callable[[], Any]:
        model, iterator = self._rank.models[chunk], self._iterators[chunk]
        config = self._rank.language_models[chunk].config

        def function() -> Any:
            # As in megatron/core/pipeline_parallel/schedules.py, forward_step.
            autocast = torch.autocast(
                "cuda", dtype=config.autocast_dtype, enabled=config.enable_autocast
            )
            with autocast if config.enable_autocast else contextlib.nullcontext():
                return self._forward_step(iterator, model)

        return function


def _intercepting(model: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """A `forward` that suspends the forward step which calls it."""
    signature = inspect.signature(stock)

    def forward(*args: Any, **kwargs: Any) -> Any:
        step = suspend.running()
        if step is None or step.model is not model or step.goes_on_itself:
            return stock(*args, **kwargs)
        if step.call is not None:
            raise refused(TWO_CALLS)
        call = calls.bound(signature, args, kwargs, step.number)
        return step.pause(call, lambda: stock(*args, **kwargs))

    return forward
