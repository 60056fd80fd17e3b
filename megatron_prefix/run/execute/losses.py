"""Losses on the last stage: the trainer's own, called once for each of its microbatches.

When the last segment of a microbatch has been through, the suspended forward step goes on with the
output of its model call (run/execute/call_outputs.py), to its own loss, which runs back to that
output at once.  What all microbatches send to a segment's output is added up there, and with that
the segment's own backward starts: the same superposition as for gK/gV, applied to the outputs
("Schedule-Level Shared-Prefix Reuse for LLM RL Training", appendix A.5, the direct adjoints of
prefix tokens).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.errors import UserError, refused
from megatron_prefix.layers.own_backward import with_backward
from megatron_prefix.refusals.own_errors import is_own
from megatron_prefix.refusals.table import FORWARD_GRAPH, STRAY_GRADIENT
from megatron_prefix.run.execute.auxiliary import AuxiliaryScales
from megatron_prefix.run.execute.call_outputs import AnswerForm, CallOutputs
from megatron_prefix.run.execute.inputs import ScoredRows
from megatron_prefix.run.read.step import Step
from megatron_prefix.run.read.suspend import SuspendedStep
from megatron_prefix.tree import Forest


@dataclass(frozen=True)
class LossContract:
    """What of Megatron's schedule arguments the loss needs.

    Attributes:
        scales: keeps what the trainer's functions say of each microbatch; None if there are none.
    """

    config: Any
    cp_size: int
    collect_non_loss_data: bool
    scales: AuxiliaryScales | None = None


class Losses:
    """The trainer's losses on the last stage: answers its model calls, and keeps its order.

    A microbatch is answered when its last segment is through and all microbatches before it are, or
    sooner where a backward needs its loss.

    A forward step cannot go on twice.  Where memory runs out and the segments run again
    (`begin_again`), losses that were called stay as they are, and the gradients that they have sent
    are sent again: so they are kept, where they are one number a position.

    Attributes:
        num_tokens: trained tokens of the step, as its losses say.
        is_inside: whether the trainer's code runs, or its loss's backward.
    """

    def __init__(
        self,
        step: Step,
        contract: LossContract,
        model: Any,
        steps: Sequence[SuspendedStep],
        form: AnswerForm = AnswerForm(),  # noqa: B008  # a tuple
    ) -> None:
        self._contract, self._model, self._steps = contract, model, steps
        self._forest, self._form = step.forest, form
        self._new_outputs = functools.partial(CallOutputs, step, form)
        self.outputs = self._new_outputs()
        self._strays: list[Tensor] = []
        self.num_tokens: int | Tensor = 0
        self._differentiable = True
        # A call with forward_only runs segments without gradients, and losses as it was called.
        self._gradients = torch.is_grad_enabled()
        self._small, self.is_inside = True, False
        self._problem: Exception | None = None
        self._has_outputs = True
        self._sent: dict[int, list[Tensor | None]] = {}
        self._again: dict[int, list[Tensor | None]] = {}
        self._stores: list[list[Any]] = [[] for _ in steps]
        self._rollouts: list[list[int]] = [[] for _ in steps]
        for rollout, microbatch in enumerate(step.microbatch_of):
            self._rollouts[microbatch].append(rollout)
        self._ready_after, self._through = _turns(step.forest, step.microbatch_of, len(steps))
        self._left = set(range(len(steps)))
        self._taken = -1
        self._released: set[int] = set()

    @property
    def forward_data_store(self) -> list[Any]:
        return [entry for store in self._stores for entry in store]

    def take(
        self, index: int, output: Any, rows: ScoredRows | None = None, *, differentiable: bool
    ) -> None:
        """Takes a segment's output, see CallOutputs; scores the microbatches whose turn it is."""
        self._differentiable = differentiable
        if self._forest.segments[index].scored and self._has_outputs:
            try:
                self.outputs.take(index, output, rows, differentiable=differentiable)
            except UserError as error:
                self._note(error)
                self._has_outputs = False
        # What another rank has computed comes late, and still before the leaves below it.
        self._taken = max(self._taken, index)
        while self._left and self._ready_after[first := min(self._left)] <= index:
            self._score(first)

    def complete(self, index: int) -> None:
        for microbatch in self._through[index]:
            if microbatch in self._left:
                self._score(microbatch)
            if microbatch in self._again:
                self._send_again(microbatch, self._again.pop(microbatch))

    def gradients(self, index: int, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        """See CallOutputs; zeros where outputs could not be taken."""
        if self._has_outputs:
            return self.outputs.gradients(index, output)
        tensors = _with_graph(output)
        return tensors, [torch.zeros_like(tensor) for tensor in tensors]

    def begin_again(self) -> None:
        """Forgets all segments, which will run again; losses that were called stay as they are."""
        self._again = dict(self._sent)
        self._strays += self.outputs.strays()
        self.outputs, self._taken = self._new_outputs(), -1
        self._released.clear()

    @property
    def repeatable(self) -> bool:
        return self._small and not self.is_inside

    def problem(self) -> Exception | None:
        """Why the step's gradients and losses must not be used; None if they may.

        The host waits for the device where positions are that nobody computed: a gradient that
        reaches one is a problem.
        """
        if self._problem is not None:
            return self._problem
        sizes = [*self._strays, *self.outputs.strays()]
        has_strays = bool(sizes) and bool(torch.stack(sizes).amax() != 0)
        return refused(STRAY_GRADIENT) if has_strays else None

    def _send_again(self, microbatch: int, gradients: list[Tensor | None]) -> None:
        tensors = _with_graph(self.outputs.answer(microbatch, self._rollouts[microbatch]))
        pairs = [p for p in zip(tensors, gradients, strict=True) if p[1] is not None]
        torch.autograd.backward([t for t, _ in pairs], [gradient for _, gradient in pairs])

    def _answer(self, microbatch: int) -> Any:
        """A microbatch's answer; the gradients that reach it are kept where they are small."""
        answer = self.outputs.answer(microbatch, self._rollouts[microbatch])
        if self._form.filled is not None:
            self._form.filled.give(self._steps[microbatch].call)
        if not self._differentiable and torch.is_grad_enabled() and _trains(self._model):
            return pytree.tree_map(_without_backward, answer)
        tensors = _with_graph(answer)
        # Logits are large; what a loss sends to weights that it was handed cannot be sent again.
        if self._form.filled is not None or any(tensor.dim() > 2 for tensor in tensors):
            self._small = False
            return answer
        gradients: list[Tensor | None] = [None] * len(tensors)
        self._sent[microbatch] = gradients
        for place, tensor in enumerate(tensors):
            tensor.register_hook(functools.partial(gradients.__setitem__, place))
        return answer

    def release(self, index: int) -> None:
        self._released.add(index)
        self._drop()

    def _drop(self) -> None:
        for index in [i for i in self._released if not self._left.intersection(self._through[i])]:
            self.outputs.kept.pop(index, None)
            self._released.remove(index)

    def _score(self, microbatch: int) -> None:
        """Lets the trainer's forward step go on, calls the loss function that it returns, and runs
        the loss back to the answer: no other microbatch's logits are there at the same time."""
        if self._ready_after[microbatch] > self._taken:
            raise RuntimeError(f"microbatch {microbatch} is asked for before its last segment")
        self._left.discard(microbatch)
        if self._has_outputs:
            try:
                self._call(microbatch)
            except Exception as error:
                if self._steps[microbatch].twice is None and not _is_of_this_package(error):
                    raise
                self._note(self._steps[microbatch].twice or error)
            self._note(self._steps[microbatch].twice)
        self.is_inside = False
        self._drop()

    def _note(self, problem: Exception | None) -> None:
        """Keeps the first problem; of what a message says in full no frame."""
        if isinstance(problem, UserError):
            problem = problem.with_traceback(None)
        self._problem = self._problem or problem

    def _call(self, microbatch: int) -> None:
        contract, step = self._contract, self._steps[microbatch]
        timers = contract.config.timers
        self.is_inside = True  # what fails from here on cannot be repeated
        timing = contextlib.nullcontext() if timers is None else _timer_of_forward(timers)
        with timing, torch.set_grad_enabled(self._gradients):
            output, loss_func = step.resume(functools.partial(self._answer, microbatch))
            loss, num_tokens = forward_step_calc_loss(
                self._model, output, loss_func, contract.config,
                getattr(self._model, "vp_stage", None), contract.collect_non_loss_data,
                len(self._steps), self._stores[microbatch], contract.cp_size, True,
            )  # fmt: skip
        if contract.scales is not None:
            contract.scales.note(microbatch)
        self.num_tokens = self.num_tokens + num_tokens
        if self._differentiable and isinstance(loss, Tensor) and loss.requires_grad:
            scale = contract.config.grad_scale_func
            torch.autograd.backward(loss if scale is None else scale(loss))


def _is_of_this_package(error: Exception) -> bool:
    """Whether an error is neither the trainer's nor of memory, which may do the next time."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return (isinstance(error, UserError) and error.refusal is not None) or is_own(error)


def are_in_order(step: Step, actions: Sequence[tuple[str, int]]) -> bool:
    """Whether `Losses` calls the losses of a step in the trainer's order."""
    num, segments = step.num_microbatches, step.forest.segments
    ready_after, through = _turns(step.forest, step.microbatch_of, num)
    turn = 0
    for kind, index in actions:
        if not segments[index].scored:
            continue
        if kind == "F":
            while turn < num and ready_after[turn] <= index:
                turn += 1
        elif any(microbatch >= turn for microbatch in through[index]):
            ready = [microbatch for microbatch in through[index] if microbatch >= turn]
            if ready != [*range(turn, turn + len(ready))]:
                return False
            turn += len(ready)
    return True


def _turns(
    forest: Forest, microbatch_of: Sequence[int], num: int
) -> tuple[list[int], list[list[int]]]:
    """Of every microbatch its last segment, and of every segment its microbatches."""
    through = [sorted(segment.microbatches(microbatch_of)) for segment in forest.segments]
    ready_after = [-1] * num
    for index, microbatches in enumerate(through):
        for microbatch in microbatches:
            ready_after[microbatch] = index
    return ready_after, through


def _trains(model: Any) -> bool:
    return any(weight.requires_grad for weight in model.parameters())


def _without_backward(leaf: Any) -> Any:
    """An answer's tensor as if it had a graph: a backward through it is refused by name."""
    if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
        return leaf
    answer: Tensor = with_backward(
        lambda x: x.view_as(x), _refuse_backward, leaf.detach().requires_grad_()
    )
    return answer


def _refuse_backward(_: Tensor) -> Tensor:
    raise refused(FORWARD_GRAPH)


def _with_graph(answer: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(answer)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@contextlib.contextmanager
def _timer_of_forward(timers: Any) -> Iterator[None]:
    """Starts the timer that `forward_step_calc_loss` stops; after a failure it can start again."""
    timer = timers("forward-compute", log_level=2)
    timer.start()
    try:
        yield
    except BaseException:
        timer.reset()
        raise
