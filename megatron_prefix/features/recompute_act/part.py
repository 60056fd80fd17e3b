"""Which segments' MLPs drop what their activation functions give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_prefix.features.recompute_act.activation import ActivatedAgain
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.plan.actions import Action


class RecomputeAct(StepPart):
    """Policy "recompute_act" in one call with gradients."""

    def begin(self, attempt: Attempt) -> None:
        """See StepPart."""
        self._plan, self._hooks = attempt.plan, [stage.hooks for stage in attempt.stages]

    @contextlib.contextmanager
    def action(self, action: Action | None) -> Iterator[None]:
        """See StepPart. Not in a backward: a checkpoint's forward again may save tensors for
        another graph, whose output has no hook, and what it saves is used at once."""
        if action is None or action.kind != "F" or not self._drops(action.segment):
            yield
            return
        hooks = self._hooks[action.chunk]
        hooks.mlp_tap = ActivatedAgain(hooks)
        try:
            yield
        finally:
            hooks.mlp_tap = None

    def _drops(self, segment: int) -> bool:
        return self._plan.policy(segment) == "recompute_act"
