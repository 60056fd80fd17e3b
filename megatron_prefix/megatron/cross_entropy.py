"""Megatron's loss of every token of a segment, without a wait for the device.

In its backward transformer-engine's cross entropy asks whether the gradient is the number one. For
that it copies a number to the device, and the host waits until all that it has launched is done: in
the middle of every wave, so that the next segment's work is not there when the device could begin.
Megatron leaves the question out in steps that become CUDA graphs; so do segments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_prefix.layers.rebound import rebound

KERNEL = "te_parallel_cross_entropy"  # as Megatron's module of language models has it


def without_waiting(method: Any, config: Any) -> Callable[..., Any] | None:
    """A language model's `compute_language_model_loss` that asks nothing; None if it is not
    Megatron's, or does not use transformer-engine's cross entropy."""
    names = getattr(getattr(method, "__func__", None), "__globals__", {})
    used = config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te"
    if not used or KERNEL not in names:
        return None

    def kernel(logits: Any, labels: Any, group: Any, *_: Any) -> Any:
        # Megatron passes it on from transformer-engine 2.7 on, which has the choice.
        return names[KERNEL](logits, labels, group, True)

    return rebound(method, **{KERNEL: kernel})
