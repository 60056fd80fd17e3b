"""A step in which device memory runs out: undone, and run once more with a leaner plan.

In that one every inner segment is recomputed.  That takes a rank that no other waits for: alone in
its pipeline, its tensor-, context- and expert-parallel groups.  Where others wait for it in a
collective it cannot go back alone, and to ask them first would cost every step a collective; then
the step ends with an error, and so do the other ranks, which lose a neighbour.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from megatron_prefix.errors import StepOutOfMemory
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.memory_policy import leaner
from megatron_prefix.run.execute.rewind import Rewind

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
    free_memory()
    logger.warning("%s: the step runs again, every inner segment recomputed", reason)
    try:
        return attempt(lean), lean
    except torch.OutOfMemoryError as error:
        reason = _first_sentence(error)
    free_memory()
    raise failure(f"{reason}; with all inner segments recomputed, too", lean)


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
