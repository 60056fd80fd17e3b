"""Runs one rank's program: forwards and backwards of segments.

A segment's forward on a stage begins with the previous stage's output and ends with handing its
own on; its backward begins with the next stage's gradient, or with the losses' on the last stage,
or with zeros there when no loss reaches the segment.  Zeros are not a trick: gK/gV enter inside the
layers, and a backward that starts at the stage's output passes every hook and every recomputation
on its way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from torch import Tensor

from megatron_prefix.layers.blocks.core import own_kernel_runs
from megatron_prefix.layers.segment import Saving, SegmentContext
from megatron_prefix.megatron.install import Hooks
from megatron_prefix.parts import StepPart, around, entered
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.run.calls import FILLED_BY_MODEL
from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.execute.losses import Losses
from megatron_prefix.run.execute.messages import Links
from megatron_prefix.run.read.forward_step_state import Settings
from megatron_prefix.run.read.heads import FilledDict
from megatron_prefix.sidecar.cache import SidecarCache


@dataclass
class Stage:
    """One model chunk during one step.

    Attributes:
        filled: what outputs put into the dict that each model call brings; None: calls bring none.
        final: what of its decoder's output crosses data-parallel ranks; None elsewhere, and where
            nothing does.
        live: input and output of segments whose backward is still to come; the output with its
            graph, or None if the forward will run again.
    """

    model: Any
    hooks: Hooks
    cache: SidecarCache
    is_first: bool
    is_last: bool
    called: Settings
    has_labels: bool
    others: Mapping[str, Any]
    chunk: int = 0
    moves_labels: bool = False
    filled: FilledDict | None = None
    losses: Losses | None = None
    final: Any = None
    live: dict[int, tuple[Tensor | None, Any]] = field(default_factory=dict)


class Executor:
    """Runs a plan on one rank.

    Args:
        idle: closed after the first action; until then no garbage is collected.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        inputs: SegmentInputs,
        forward_only: bool,
        idle: contextlib.ExitStack,
        drawing: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        parts: Sequence[StepPart] = (),
    ) -> None:
        self._drawing, self._parts = drawing, [*parts]
        self._idle = idle
        self._plan, self.stages, self._inputs = plan, stages, inputs
        self._forward_only = forward_only

    def run(self, rank: int, links: Links) -> None:
        """Runs the rank's program; whatever happens, nothing of the step is left behind."""
        self._links = links
        try:
            for stage in self.stages:
                stage.hooks.prepare(self._inputs.max_position)
            with torch.no_grad() if self._forward_only else contextlib.nullcontext():
                for action in self._plan.programs[rank]:
                    stage = self.stages[action.chunk]
                    with _annotated(action), around(self._parts, action):
                        self._run(action, stage)
                    self._idle.close()
                    links.advance()
            links.finish()
            for part in self._parts:
                part.ran()
        finally:
            self.end()

    def end(self) -> None:
        for stage in self.stages:
            stage.hooks.end_step()
            for kept in (stage.live, stage.cache, stage.final):
                if kept is not None:
                    kept.clear()
        for part in self._parts:
            part.end()
        # Contexts of segments hold the list, and what a module has kept of one holds its context.
        self._parts.clear()

    def _run(self, action: Action, stage: Stage) -> None:
        starts = [part.starts(action, self) for part in self._parts]  # all of them are asked
        self._links.advance()
        runs_here = all(starts)
        if runs_here and action.kind == "F":
            self._forward(action, stage)
        elif runs_here and not self._forward_only:
            self._backward(action, stage)
        elif action.kind == "B":
            self._release(action, stage)

    def context(
        self, index: int, stage: Stage, backward: bool = False, saving: Saving | None = None
    ) -> SegmentContext:
        segment, final = self._plan.segments[index], stage.final
        runs = own_kernel_runs(stage.cache.map.lengths[index], *self._inputs.place)
        positions = self._inputs[index][2]
        decoded, on_decoded = (None, None) if final is None else final.of(index)
        unread, scored = stage.is_last and not segment.scored, self._scored(index, stage)
        return SegmentContext(
            index, segment.inner, runs, positions, stage.cache, backward, saving, self._parts,
            stage.hooks.keys_only if unread else None,
            self._inputs.read(index, stage.moves_labels) if scored else None, stage.moves_labels,
            decoded, on_decoded, joined=segment.joined >= 0,
        )  # fmt: skip

    def _forward(self, action: Action, stage: Stage) -> None:
        index = action.segment
        received = None if stage.is_first else self._links.receive(action)
        if received is not None and not self._forward_only:
            received.requires_grad_()
        again = self._plan.policy(index) == "recompute"
        saving = None
        if not (again or self._forward_only):
            every = (part.saving(index, action.chunk, received) for part in self._parts)
            saving = next(filter(None, every), None)
        with self.computing(action):
            with torch.no_grad() if again else contextlib.nullcontext(), self._drawing():
                output = self.call(index, stage, received, saving)
            for part in self._parts if again else ():
                part.freed(index, action.chunk)
            if self._scored(index, stage):
                self.take(index, stage, output)
        if not self._forward_only:
            stage.live[index] = received, None if again else output
        if not stage.is_last:
            self._links.send(action, output)
            if self._frees_outputs(stage) and not again:
                deallocate_output_tensor(output, True)

    def computing(self, action: Action) -> contextlib.AbstractContextManager:
        return entered(part.computing(action) for part in self._parts)

    def take(self, index: int, stage: Stage, output: Any) -> None:
        """Gives the losses a segment's output."""
        rows, losses = self._inputs.rows(index), stage.losses
        losses.take(index, output, rows, differentiable=not self._forward_only)  # type: ignore[union-attr]

    def call(
        self, index: int, stage: Stage, received: Tensor | None, saving: Saving | None = None
    ) -> Any:
        stage.hooks.model.set_input_tensor(received)
        scored = self._scored(index, stage)
        context = self.context(index, stage, saving=saving)
        with stage.hooks.running(context, scored=scored), stage.called.autocasting():
            forward = stage.hooks.forward
            others = dict(stage.others)
            for part in self._parts:
                others |= part.arguments(index, stage.chunk)
            if stage.filled is not None:
                others[FILLED_BY_MODEL] = dict(stage.filled.brought)
            moves_labels = scored and stage.moves_labels
            output = self._inputs.call(forward, index, stage.has_labels, others, moves_labels)
            if stage.filled is not None:
                stage.filled.take(others, scored=scored)
            return output

    def _backward(self, action: Action, stage: Stage) -> None:
        index = action.segment
        received, output = stage.live[index]
        freed = not stage.is_last and output is not None and self._frees_outputs(stage)
        if output is None:  # while the gradient is on its way
            with self.computing(action):
                output = self.call(index, stage, received)
        gradient = None if stage.is_last else self._links.receive(action)
        for part in self._parts:
            part.backward(index, action.chunk)
        stage.live[index] = received, output
        output = None  # what `live` has goes while it is timed, and its bytes are counted
        with self.computing(action):
            self._differentiate(index, stage, gradient, freed=freed)
        if received is not None:
            if received.grad is None:
                raise RuntimeError(f"{action}: no gradient has reached the stage's input")
            self._links.send(action, received.grad)
        self._release(action, stage)

    def _differentiate(
        self, index: int, stage: Stage, gradient: Tensor | None, *, freed: bool
    ) -> None:
        """Runs a segment's backward, from its losses or from the gradient that the next stage has
        sent; `freed`: whether the output has its graph only."""
        _, output = stage.live.pop(index)
        scored, context = self._scored(index, stage), self.context(index, stage, backward=True)
        if scored:  # outside of the hooks: a loss may call the model
            stage.losses.complete(index)  # type: ignore[union-attr]
        with stage.hooks.running(context, scored=scored):
            if scored:
                tensors, gradients = stage.losses.gradients(index, output)  # type: ignore[union-attr]
                if stage.final is not None:
                    states, of_states = stage.final.gradients(index)
                    tensors, gradients = tensors + states, gradients + of_states
                torch.autograd.backward(tensors, gradients)
            elif freed:
                custom_backward(output, gradient)
            else:
                gradient = torch.zeros_like(output) if gradient is None else gradient
                torch.autograd.backward(output, gradient)

    def _scored(self, index: int, stage: Stage) -> bool:
        return stage.losses is not None and self._plan.segments[index].scored

    def _release(self, action: Action, stage: Stage) -> None:
        for part in self._parts:
            part.freed(action.segment, action.chunk)
        if stage.losses is not None:
            stage.losses.release(action.segment)
        if stage.final is not None:
            stage.final.drop(action.segment)
        if self._plan.segments[action.segment].inner:
            stage.cache.free(action.segment, consumed=not self._forward_only)

    def _frees_outputs(self, stage: Stage) -> bool:
        """Whether outputs that were sent keep their graph only (Megatron's option)."""
        return stage.hooks.model.config.deallocate_pipeline_outputs and not self._forward_only


def _annotated(action: Action) -> contextlib.AbstractContextManager:
    """An NVTX range with the action's name, as the trainers' profilers show them."""
    if torch.cuda.is_available():
        return torch.cuda.nvtx.range(str(action))
    return contextlib.nullcontext()
