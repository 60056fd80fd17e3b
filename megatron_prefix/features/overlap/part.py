"""What starts reductions during a step: marks on the inputs of layers, by reductions.py's rules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from megatron_prefix.features.overlap.reductions import Reductions
from megatron_prefix.megatron.install import Hooks
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.plan.actions import Action


class Overlap(StepPart):
    """The reductions of one step."""

    _reductions: Reductions | None = None  # of the last attempt
    _all_begun = False

    def begin(self, attempt: Attempt) -> None:
        """See StepPart.

        Raises:
            RuntimeError: reductions of another step are under way.
        """
        crosses = attempt.step.crosses
        self._reductions = Reductions(self.rank, attempt.force_all_reduce, crosses=crosses)
        self._hooks = [stage.hooks for stage in attempt.stages]
        program = attempt.plan.programs[self.rank.stage]
        self._last = {action.chunk: action.segment for action in program if action.kind == "B"}

    @contextlib.contextmanager
    def action(self, action: Action | None) -> Iterator[None]:
        """See StepPart. The segment whose backward is its model chunk's last is marked in its
        forward; what is behind the models' inputs comes last of all."""
        with contextlib.ExitStack() as stack:
            if action is None:
                stack.enter_context(self.reductions.watching())
            elif self.is_last(action):
                if (passing := self.reductions.passing(action.chunk)) is not None:
                    stack.enter_context(_marking(self._hooks[action.chunk], passing))
                if action.kind == "B":
                    stack.enter_context(self.reductions.watching(action.chunk))
            yield

    def is_last(self, action: Action) -> bool:
        """Whether an action is of the segment whose backward is its model chunk's last."""
        return self._last.get(action.chunk) == action.segment

    def behind(self) -> None:
        """See StepPart: ranks may have begun some; all begin the rest in their one order, unless
        nothing here ends them."""
        if self._finalizes and self._reductions is not None:
            self._reductions.start_rest()
            self._all_begun = True

    def finished(self) -> None:
        """See StepPart."""
        if not self._finalizes:
            self.reductions.start_rest()
        self.reductions.check()

    @property
    def why_final(self) -> str:  # type: ignore[override]
        """See StepPart."""
        begun = self._all_begun or (self._reductions is not None and self._reductions.begun)
        return "its gradients were being reduced: turn overlap_grad_reduce off" if begun else ""

    @property
    def problem(self) -> Exception | None:  # type: ignore[override]
        """See StepPart; in mode "on" `finished` raises it, when all reductions are over."""
        late = self.config.mode != "on" and self._reductions is not None
        return self.reductions.error if late else None

    @property
    def reductions(self) -> Reductions:
        """Of the attempt that runs."""
        if self._reductions is None:
            raise RuntimeError("no attempt has begun")
        return self._reductions

    @property
    def _finalizes(self) -> bool:
        return self.rank.config.finalize_model_grads_func is not None


@contextlib.contextmanager
def _marking(hooks: Hooks, passing: Callable[[int], None]) -> Iterator[None]:
    """Calls `passing` with a layer's number when the gradient of its input is computed, of
    segments whose forward is inside."""
    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(hooks.model.decoder.layers):
            mark = functools.partial(_mark, hooks, functools.partial(passing, number))
            stack.callback(layer.register_forward_pre_hook(mark, with_kwargs=True).remove)
        yield


def _mark(
    hooks: Hooks, passed: Callable[[], None], _: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict] | None:
    """Marks a layer's input, a view: autograd comes to it after all that follows, and adds up
    gradients of leaves before others."""
    if hooks.current is None or not torch.is_grad_enabled():
        return None
    hidden = args[0] if args else kwargs["hidden_states"]
    if not hidden.requires_grad:
        return None
    marked = hidden.view_as(hidden)
    marked.register_hook(lambda _: passed())
    if args:
        return (marked, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": marked}
