"""The output layer on what another rank's decoder gives for a segment with loss.

It runs again for its backward: what it saves would live from the step's begin to its end.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_prefix.plan.actions import Action
from megatron_prefix.run.execute.executor import Executor


def head(executor: Executor, index: int, chunk: int) -> None:
    """Runs the output layer on a received segment, and gives the losses what it returns."""
    stage = executor.stages[chunk]
    with executor.computing(Action("F", index, chunk)), torch.no_grad():
        output = executor.call(index, stage, stage.final.received[index])
        executor.take(index, stage, output)


def head_backward(executor: Executor, chunk: int, index: int) -> None:
    """Runs its backward, once all losses of the segment have run: the gradient is that of
    `Stage.final.received` then."""
    stage: Any = executor.stages[chunk]
    stage.losses.complete(index)
    with executor.computing(Action("B", index, chunk)):
        output = executor.call(index, stage, stage.final.received[index])
        with stage.hooks.running(executor.context(index, stage, backward=True)):
            torch.autograd.backward(*stage.losses.gradients(index, output))
