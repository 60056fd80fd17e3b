"""FLOPs of an update, and what the device could do at most, for metrics and benchmarks.

Matrix products and attention pairs of forward and backward, a backward counting as two forwards.
What is computed again for memory is not counted, as MFU has it ("PaLM: Scaling Language Modeling
with Pathways", appendix B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel, Work, causal_pairs
from megatron_prefix.run.report import StepReport

PEAK_FLOPS = {
    "A100": 312e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "H20": 148e12, "B200": 2250e12,
}  # fmt: skip
"""Dense bf16 rates by the GPU's name, NVIDIA's data sheets."""


def cost_model(spec: ModelSpec) -> CostModel:
    """Forward FLOPs of a model, without any overhead."""
    if spec.vocab_size is None:
        raise UserError(f"model {spec.name} has no vocabulary yet; call with_vocab(size)")
    forward = cost_of(spec).forward
    # A backward expands once more, and what is counted here is a third of both.
    return CostModel.of_flops(*forward[:3], action_tokens=0.0, expansion=4 / 3 * forward.seen)


def peak_flops(dtype: str) -> float | None:
    """Of this process's GPU, a second; None in another dtype than bfloat16, without a GPU, and
    if its rate is not known here."""
    if dtype != "bfloat16" or not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().replace("-", " ").split()
    hopper = not {"H100", "H200", "H800"}.isdisjoint(words)
    if "MIG" in words or (hopper and not {"PCIe", "NVL"}.isdisjoint(words)):
        return None  # a part of a GPU, or cards with a lower rate
    return next((rate for name, rate in PEAK_FLOPS.items() if name in words), None)


def of_microbatches(cost: CostModel, items: Sequence[Mapping[str, Any]], cp_size: int) -> float:
    """Of the stock schedule on microbatches, or on context-parallel slices of them."""
    lengths = [
        length
        for item in items
        for length in (
            item["cu_seqlens"].diff().tolist()
            if "cu_seqlens" in item
            else [cp_size * item["tokens"].shape[1]]
        )
    ]
    positions = sum(lengths)
    pairs = sum(causal_pairs(0, length) for length in lengths)
    return 3 * cost.of_work(Work(positions, positions, pairs))


def of_report(cost: CostModel, report: StepReport) -> float:
    """Of a step that the prefix schedule ran."""
    return 3 * cost.prefix(report.forest)
