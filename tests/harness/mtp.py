"""Models with a layer of multi-token prediction, and steps that show what it reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from torch import Tensor

from megatron_prefix.lab import numerics
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.megatron.logged_losses import logged_losses
from tests.harness import hybrid, steps
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract, Microbatch

FACTOR = 3.0
"""Of the loss: what is wrong in it must not vanish beside the model's own."""


def model_of(**options: Any) -> Any:
    """A small model with the layer; equal arguments give equal weights."""
    over = {"mtp_loss_scaling_factor": FACTOR, **options.pop("config_overrides", {})}
    spec = {"mtp_num_layers": 1, **options.pop("spec", {})}
    return small_model(spec=spec, config_overrides=over, **options)


def masked() -> list[Microbatch]:
    """Labels are zero where they carry no loss, and prompts that begin alike go on differently."""
    found = hybrid.items()
    draw = np.random.default_rng(7)
    for item in found[:2]:  # the pair (input, label) is the others', the next input is not
        item["tokens"][:, 11:29] = torch.from_numpy(draw.integers(0, 60, 18))
    for item in found:
        item["labels"] = item["labels"] * (item["loss_mask"] != 0)
    return found


class Found(NamedTuple):
    """What a step gave: logs of losses, gradients, Megatron's log of this loss and of the routers'
    losses, and their biases."""

    logs: list[Any]
    gradients: dict[str, Tensor]
    logged: dict[str, Tensor]


def run(
    schedule: Any, model: Any, contract: Contract, items: list[Microbatch], **options: Any
) -> Found:
    """A step of a trainer; biases of experts are put back afterwards."""
    tracker, inner = MTPLossLoggingHelper.tracker, unwrap(model)
    tracker.clear()
    forget_logged_losses()
    MTPLossAutoScaler.set_loss_scale(torch.tensor(17.0))  # of another step
    before = [buffer.clone() for buffer in inner.buffers()]
    contract.configure(model)
    step = options.pop("step", contract.step)
    logs, gradients = steps.run(schedule, step, model, items, **options)
    logged = {name: value.clone() for name, value in tracker.items() if "values" in name}
    logged |= logged_losses()
    logged |= {name: one.clone() for name, one in inner.named_buffers() if "bias" in name}
    for buffer, value in zip(inner.buffers(), before, strict=True):
        buffer.copy_(value)
    return Found(logs, gradients, logged)


def assert_same(found: Found, expected: Found, items: list[Microbatch]) -> None:
    """By the numerics policy; Megatron keeps its log in float32."""
    num = sum(item["tokens"].numel() for item in items)
    steps.assert_gradients(found.gradients, expected.gradients, num)
    limit = numerics.tolerance(torch.float64, num)
    for ours, theirs in zip(found.logs, expected.logs, strict=True):
        if isinstance(theirs, dict):
            assert abs(ours["loss"] - theirs["loss"]) <= limit * (1 + abs(theirs["sum"]))
    assert found.logged.keys() == expected.logged.keys()
    limit = numerics.tolerance(torch.float32, len(items))
    for name, theirs in expected.logged.items():
        torch.testing.assert_close(found.logged[name], theirs, rtol=limit, atol=0.0)
