"""A step in which device memory runs out: undone, and run once more with a leaner plan.

In that one every inner segment is recomputed.  That takes a rank that no other waits for: alone in
its pipeline, its tensor-, context- and expert-parallel groups.  Where others wait for it in a
collective it cannot go back alone, and to ask them first would cost every step a collective; then
the step ends with an error, and so do the other ranks, which lose a neighbour.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from megatron_prefix.device.modules import modules_of
from megatron_prefix.errors import StepOutOfMemory
from megatron_prefix.megatron.install import installed
from megatron_prefix.moe import versions
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.memory_policy import leaner
from megatron_prefix.run.rank import Rank

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def run(
    attempt: Callable[[Plan], Result],
    plan: Plan,
    before: Rewind | None,
    *,
    is_alone: bool,
    why_final: Callable[[], str],
    failure: Callable[[str, Plan], StepOutOfMemory],
) -> tuple[Result, Plan]:
    """Runs a step; if memory runs out, undoes it and runs it once more with a leaner plan.

    Args:
        attempt: runs a plan, and leaves nothing behind when it fails.
        plan: of the step.
        before: what the step changes, as it was; None if it is not to run again.
        is_alone: whether no other rank waits for this one in the middle of a step.
        why_final: asked when memory has run out; why the step cannot run again, else empty.
        failure: the error for a reason and the plan that did not fit.

    Returns:
        What `attempt` returned, and the plan that it ran.

    Raises:
        StepOutOfMemory: the step does not fit.
    """
    if before is not None:
        before.looked()
    try:
        return attempt(plan), plan
    except torch.OutOfMemoryError as error:
        reason = _first_sentence(error)
    # The frames of the failed step, and all tensors in them, are gone by now.
    free_memory()
    lean = leaner(plan)
    if lean is None or before is None:
        why = "nothing leaner is left" if is_alone else "other ranks wait in this step"
        raise failure(f"{reason}; not tried again: {why}", plan)
    if why := why_final():
        raise failure(f"{reason}; not tried again: {why}", plan)
    if not before.possible():
        why = "gradients were not zero when the step began"
        raise failure(f"{reason}; not tried again: {why}", plan)
    before.undo()
    before.give_back()
    logger.warning("%s: the step runs again, every inner segment recomputed", reason)
    try:
        return attempt(lean), lean
    except torch.OutOfMemoryError as error:
        reason = _first_sentence(error)
    free_memory()
    raise failure(f"{reason}; with all inner segments recomputed, too", lean)


class Rewind:
    """What a call changes other than the weights, as it was; the host does not wait for the device.

    Gradients are not copied: a call can be repeated where they were zero when it began, as they are
    after the `zero_grad_buffer` of the usual training loop; then they are zeroed again.  Of the
    rest there is little: buffers of modules (the experts' token counts) and Megatron's log of
    auxiliary losses.  Random numbers are drawn by losses only, which run once in any case.

    Args:
        rank: whose call it is.
    """

    def __init__(self, rank: Rank) -> None:
        self._models = rank.models
        self._logged = versions.logged_losses if rank.has_experts else dict
        modules = list(modules_of(*rank.models))
        self._parameters = [
            p for module in modules for p in module._parameters.values() if p is not None
        ]
        self._copies = [
            (buffer, buffer.clone())
            for module in modules
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        self._losses = {name: values.clone() for name, values in self._logged().items()}
        self._has_gradients = any(parameter.grad is not None for parameter in self._parameters)
        # Looked at only when memory has run out; until then it is one pass over the gradients,
        # besides what the host sends to the device while it plans.
        device = rank.device
        self._side = _side_stream(device) if device.type == "cuda" else None
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            self._is_dirty = [total.any() for total in self._totals()]

    def looked(self) -> None:
        """From here on the device may change gradients: it has looked at them before."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def possible(self) -> bool:
        """Whether gradients were zero; waits for the device."""
        return not (self._has_gradients or any(map(bool, self._is_dirty)))

    @torch.no_grad()
    def undo(self) -> None:
        """Puts everything back as it was.

        Raises:
            RuntimeError: gradients were not zero.
        """
        if not self.possible():
            raise RuntimeError("gradients were not zero when the step began")
        for total in self._totals():
            total.zero_()
        for parameter in self._parameters:
            parameter.grad = None
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = False
        for buffer, copy in self._copies:
            buffer.copy_(copy)
        for name, values in self._logged().items():
            if name in self._losses:
                values.copy_(self._losses[name])
            else:
                values.zero_()

    def give_back(self) -> None:
        """Frees what CUDA graphs of layers hold: as much as all segments keep that had some at
        once, while the leaner plan is to hold one of them."""
        for hooks in filter(None, map(installed, self._models)):
            if hooks.graphs is not None:
                hooks.graphs.give_back()
        free_memory()

    def _totals(self) -> list[Tensor]:
        """Buffers in which DDP adds gradients up."""
        return [
            buffer.grad_data
            for model in self._models
            for name in ("buffers", "expert_parallel_buffers")
            for buffer in (getattr(model, name, None) if hasattr(model, "ddp_config") else None)
            or ()
        ]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def free_memory() -> None:
    """Returns what is no longer used to the device; models and their hooks refer to one another.

    Twice: what a suspended generator holds goes only after it has been closed.
    """
    gc.collect()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _first_sentence(error: BaseException) -> str:
    return "out of device memory: " + str(error).partition(". ")[0]
