"""[pure] Megatron-LM: pretrain_gpt.py, and other scripts on megatron.training."""

from __future__ import annotations

import sys
from typing import Any

from megatron_prefix.trainers.trainer import Trainer


def arguments() -> Any:
    """Megatron-LM's command line as it was parsed; None before that, and without it."""
    module = sys.modules.get("megatron.training.global_vars")
    try:
        return module.get_args() if module else None
    except AssertionError:  # nobody has parsed one
        return None


def _refusal() -> str:
    args = arguments()
    if getattr(args, "export_kd_teacher_load", None):
        return "--export-kd-teacher-load: its loss reads hidden states of both models: leave it out"
    if getattr(args, "use_legacy_models", False):
        return "--use-legacy-models: leave it out: only Megatron-Core's models run in segments"
    return ""


TRAINER = Trainer(
    name="Megatron-LM",
    module="megatron.training",
    package="",
    tried=("core_v0.16.1 (55ac70825)", "core_v0.19.0 (5be962670)", "wheel 0.19.2"),
    on="torchrun -m megatron_prefix.run pretrain_gpt.py ... --prefix-schedule auto",
    loss="loss_mask of the model call",
    together="nothing: samples are dealt out in the order of the data set; a row that packs a whole"
    " group (--sft, --dataloader-inter-document-masking) keeps it together",
    refused=(
        ("--reset-attention-mask", "its mask is not causal: pack documents instead"),
        ("--export-kd-teacher-load", "its loss reads hidden states of both models"),
        ("--use-legacy-models", "only Megatron-Core's models run in segments"),
        ("--hybrid-context-parallel", "it brings its own loop"),
    ),
    refusal=_refusal,
)
