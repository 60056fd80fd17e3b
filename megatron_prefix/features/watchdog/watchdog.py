"""Says where a step stands that takes many times its usual or predicted time; it ends nothing.

Each step has a thread that sleeps until then, and ends with the step. What the step is doing is
read from the stacks of its threads only when it has to be said, so actions pay nothing.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_prefix.errors import listed
from megatron_prefix.run import agreement
from megatron_prefix.run.read import suspend

logger = logging.getLogger(__name__)

TIMES = 10
"""A step is told of after so many times its usual or predicted time."""
RECENT_STEPS = 8
"""The longest of so many is the usual time."""
MOST_FRAMES = 6
"""Innermost functions that a line names."""


class Mark(NamedTuple):
    """Functions that say what a step does while they run.

    Attributes:
        module: that has them, or a package.
        function: their name, or how it begins.
        text: what the step does.
    """

    module: str
    function: str
    text: str

    def fits(self, frame: FrameType) -> bool:
        """Whether a frame is of one of them."""
        module = frame.f_globals.get("__name__", "")
        inside = module == self.module or module.startswith(f"{self.module}.")
        return inside and frame.f_code.co_name.startswith(self.function)


PHASES = (
    Mark("megatron_prefix.run.step_reader", "read", "reading the microbatches"),
    Mark("megatron_prefix.run.schedule", "_plan", "planning"),
    Mark("megatron_prefix.run.step_run", "run", "in the prefix schedule"),
    Mark("megatron.core.pipeline_parallel.schedules", "forward_backward", "in the stock schedule"),
    Mark("megatron_prefix.features.verify", "run_both", "verifying"),
)
WAITS = (
    Mark("megatron_prefix.run.execute.messages", "", "a message between pipeline stages"),
    Mark("megatron_prefix.run.agreement", "", "an agreement of ranks"),
    Mark(
        "megatron_prefix.features.across", "", "an exchange of prompts across data-parallel ranks"
    ),
    Mark("megatron_prefix.features.experts.group_counts", "", "a sum of routers' counts"),
    Mark("megatron_prefix.features.overlap.reductions", "", "a reduction of gradients"),
    Mark("megatron_prefix.sidecar.row_exchange", "", "an exchange of context-parallel ranks"),
    Mark("megatron.core.distributed.finalize_model_grads", "", "a reduction of gradients"),
    Mark("megatron.core.distributed.param_and_grad_buffer", "", "a reduction of gradients"),
    Mark("megatron.core.transformer.moe.token_dispatcher", "", "the exchange of experts"),
    Mark("megatron.core.pipeline_parallel.p2p_communication", "", "a message between stages"),
    Mark("megatron.core.tensor_parallel.mappings", "", "an exchange of tensor-parallel ranks"),
)
"""Of the innermost frame that fits one of them."""
_TORCH = Mark("torch.distributed.distributed_c10d", "", "")
_EXECUTOR = Mark("megatron_prefix.run.execute.executor", "run", "")
_NAMED = ("doing", "sender", "receiver", "peer")
"""Local variables of such functions that say more."""


_watched: set[int] = set()
"""Threads whose step is watched: a schedule inside of it is part of that."""


class Watchdog:
    """Watches the steps of one schedule, one at a time.

    Args:
        least_s: seconds that any step may take before it is told of; 0: none is.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)

    @contextlib.contextmanager
    def step(self, predicted: Callable[[], float]) -> Iterator[None]:
        """Watches a step of the calling thread.

        Args:
            predicted: the seconds that it is predicted to take; 0: nobody knows.
        """
        ident = threading.get_ident()
        if ident in _watched or not self._least_s:
            yield
            return
        begin, over = time.monotonic(), threading.Event()
        arguments = over, begin, ident, predicted
        thread = threading.Thread(target=self._watch, args=arguments, name="watchdog", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            thread.start()
        _watched.add(ident)
        try:
            yield
        finally:
            _watched.discard(ident)
            over.set()
            if thread.ident is not None:
                thread.join(1.0)  # longer only where what it writes to is blocked
        self._recent.append(time.monotonic() - begin)

    def _watch(
        self, over: threading.Event, begin: float, ident: int, predicted: Callable[[], float]
    ) -> None:
        next_s = self._least_s
        while not over.wait(begin + next_s - time.monotonic()):
            usual, expected = max(self._recent, default=0.0), predicted()
            next_s = max(self._least_s, TIMES * usual, TIMES * expected)
            seconds = time.monotonic() - begin
            if seconds < next_s:
                continue
            next_s = 2 * seconds
            with contextlib.suppress(Exception):  # whatever is on a stack, the step goes on
                logger.warning(MESSAGE, _rank(), seconds, usual, expected, place(ident))


MESSAGE = (
    "%s: a step has taken %.3g s (usual: %.3g, predicted: %.3g), %s. Compare this line on all"
    " ranks: the rank at another place holds the others up. The step is not stopped; to stop the"
    " job, send TERM to the process that started the ranks"
)


def predicted_seconds(report: Any) -> float:
    """Of the schedule that a step was decided to take; 0 if nothing was predicted."""
    if report is None or report.prediction is None:
        return 0.0
    shares, prediction = report.decision.share, report.prediction
    return float(prediction.prefix_seconds if shares else prediction.stock_seconds)


def place(ident: int) -> str:
    """Where a step stands whose thread has this number: its schedule, action and collective, and
    the innermost functions of its thread, and of autograd's."""
    stacks = {number: _stack(frame) for number, frame in sys._current_frames().items()}
    own, step = stacks.pop(ident), suspend.running()
    if step is not None:
        own += _stack(step.below)
    stacks.pop(threading.get_ident(), None)
    other_stacks = [stack for stack in stacks.values() if any(map(_is_ours, stack))]
    phases = dict.fromkeys(mark.text for frame in own for mark in PHASES if mark.fits(frame))
    parts = [*(phases or ["around its schedule"]), *_action(own)]
    for stack in (*other_stacks, own):
        if waits := _waits(stack):
            parts.append(f"at {waits}")
            break
    for name, stack in [
        ("it stands in", own),
        *(("another thread in", stack) for stack in other_stacks),
    ]:
        parts.append(f"{name} {' < '.join(map(_call_name, stack[:MOST_FRAMES]))}{_layer(stack)}")
    return ", ".join(parts)


def _rank() -> str:
    return agreement.named(dist.get_rank()) if dist.is_initialized() else "a process"


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Frames from the innermost on."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(("megatron_prefix.", "megatron."))


def _call_name(frame: FrameType) -> str:
    module = str(frame.f_globals.get("__name__", "")).rpartition(".")[2]
    return f"{module}.{frame.f_code.co_name}:{frame.f_lineno}"


def _action(stack: list[FrameType]) -> Iterator[str]:
    """The action of the executor that is on a stack."""
    for frame in filter(_EXECUTOR.fits, stack):
        names = frame.f_locals
        if "action" in names:
            action, program = names["action"], names["self"]._plan.programs[names["rank"]]
            number, total = program.index(action) + 1, len(program)
            yield (
                f"action {number} of {total}: {action} (segment {action.segment}, chunk"
                f" {action.chunk})"
            )


def _waits(stack: list[FrameType]) -> str:
    """What a thread waits for, by the innermost frames that say so; "" if none does."""
    parts = []
    for frame, mark in itertools.product(stack, WAITS):
        if mark.fits(frame):
            names = frame.f_locals
            parts = [mark.text, *(f"{name} {names[name]}" for name in _NAMED if name in names)]
            break
    for frame in [*filter(_TORCH.fits, stack)][-1:]:  # the outermost is what was called
        parts.append(f"{frame.f_code.co_name}{_group_members(frame.f_locals.get('group'))}")
    return ", ".join(parts)


def _group_members(group: Any) -> str:
    """The ranks of a process group; None: of all."""
    ranks = dist.get_process_group_ranks(group)
    return f" of ranks {listed(ranks, agreement.MOST_HOSTS)}"


def _layer(stack: list[FrameType]) -> str:
    """Megatron's layer that a stack is in."""
    for frame in stack:
        number = getattr(frame.f_locals.get("self"), "layer_number", None)
        if isinstance(number, int):
            return f" (layer {number})"
    return ""
