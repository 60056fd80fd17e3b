"""What the model calls of a step that the stock schedule runs say of their samples' lengths.

Mode "auto" gives a step to the stock schedule to time it. What that computes is known by lengths
alone, so the forward steps go straight on with the model: nothing is read before, and no tree is
built. Lengths of packs are read from the device when the step has run, and its time is taken.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.megatron.install import intercepted
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.prediction import Prediction, predict
from megatron_prefix.run.calls import (
    EMBEDDINGS,
    PER_POSITION,
    ModelCall,
    bound,
    layouts,
    versions_of,
)
from megatron_prefix.run.read.step import Step, told
from megatron_prefix.run.request import Request

logger = logging.getLogger(__name__)


class Outlines:
    """Notes the model calls of one step."""

    def __init__(self, request: Request) -> None:
        self._rank, self._slices = request.rank, request.callbacks.slices
        self._calls: list[ModelCall] = []

    def noted(self) -> contextlib.AbstractContextManager[None]:
        """Around the step. The first stage's calls say what samples there are."""
        if self._rank.is_first:
            return intercepted(self._rank.models[0], self._intercepting)
        return contextlib.nullcontext()

    def predicted(self, request: Request) -> Prediction | None:
        """Of the step what the stock schedule has computed, with nothing beside it, on all stages
        of a pipeline, which call this together; None if its calls do not say what it is. The host
        waits for the device."""
        rank, step = self._rank, self._step(request.arguments["num_microbatches"])
        if step is None:
            return None
        joint = JointForest.alone(step.forest, step.microbatch_of)
        plan = Plan((), ((),) * rank.num_stages, len(rank.models))
        return predict(request.costs.times, joint.union, joint.union_microbatch_of, plan)

    def _step(self, num_microbatches: int) -> Step | None:
        """Without segments."""
        rank, step = self._rank, None
        try:
            if rank.is_first and len(self._calls) == num_microbatches:
                step = self._read()
        except Exception as error:  # noqa: BLE001  # it has run, and other stages wait to hear of it
            logger.debug("a step that was timed cannot be read: %s", error)
        self._calls.clear()
        return told(step, None, rank.groups.pp, rank.device)

    def _read(self) -> Step | None:
        for call in self._calls:
            call.check_unchanged()
        rank = self._rank
        ranks = rank.groups.cp.size(), rank.model.sequence_ranks
        places = layouts(self._calls, *ranks, self._slices)
        return None if places is None else Step.of(places, align=rank.model.alignment)

    def _intercepting(self, _: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(stock)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if (
                torch.is_grad_enabled()
            ):  # else it is beside the microbatch's own (run/read/suspend.py)
                call = bound(signature, args, kwargs, len(self._calls))
                self._calls.append(_outline(call))
            return stock(*args, **kwargs)

        return forward


def _outline(call: ModelCall) -> ModelCall:
    """A call with the shapes of what is per position, and its packing: it holds no memory."""
    names = (*PER_POSITION, EMBEDDINGS)
    tensors = {name: value for name in names if isinstance(value := call[name], Tensor)}
    outlined: dict[str, Any] = {
        name: torch.empty(value.shape, device="meta")
        for name, value in tensors.items()
        if not value.is_nested
    }
    outlined["packed_seq_params"] = call["packed_seq_params"]
    return ModelCall(call.microbatch, outlined, versions_of(outlined))
