"""Recurrent layers by their definition, for a reference in fp32.

Products of Triton in fp32 are TF32. With IEEE's, a backward kernel of flash-linear-attention 0.4.2
is not compiled within minutes (benchmarks/LOG.md).
"""

from __future__ import annotations

from typing import Any

from megatron_prefix.features.recurrent.definition import chunk_gated_delta_rule
from megatron_prefix.lab.platforms import linear_kernels as kernels
from megatron_prefix.layers.rebound import rebound
from megatron_prefix.layers.table import payload_parts
from megatron_prefix.megatron.install import language_model


def by_definition(model: Any) -> None:
    """Gives the recurrent layers of a model chunk, for good, plain torch's kernels.

    Instances are changed, and only they: the model is for stock schedules.
    """
    rule = chunk_gated_delta_rule
    for _, module in payload_parts(language_model(model)):
        if hasattr(module, "_ssm_training"):
            scan = kernels.mamba_split_conv1d_scan_combined
            stock = module._ssm_training
            module._ssm_training = rebound(stock, mamba_split_conv1d_scan_combined=scan)
        elif hasattr(module, "gated_delta_rule"):  # since 0.18
            module.gated_delta_rule = rule
        elif hasattr(module, "conv1d"):
            module.forward = rebound(module.forward, chunk_gated_delta_rule=rule)
