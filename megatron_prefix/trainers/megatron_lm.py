"""[pure] Megatron-LM: pretrain_gpt.py, and other scripts on megatron.training."""

from __future__ import annotations

import sys
from typing import Any

from megatron_prefix.errors import Refusal
from megatron_prefix.refusals.table import DISTILLATION, LEGACY_MODELS, OWN_CP_LOOP, RESET_MASK
from megatron_prefix.trainers.trainer import Trainer


def arguments() -> Any:
    """Megatron-LM's command line as it was parsed; None before that, and without it."""
    module = sys.modules.get("megatron.training.global_vars")
    try:
        return module.get_args() if module else None
    except AssertionError:  # nobody has parsed one
        return None


def _refusal() -> Refusal | None:
    args = arguments()
    if getattr(args, "export_kd_teacher_load", None):
        return DISTILLATION
    if getattr(args, "use_legacy_models", False):
        return LEGACY_MODELS
    return None


TRAINER = Trainer(
    name="Megatron-LM",
    module="megatron.training",
    package="",
    tried=("core_v0.16.1 (55ac70825)", "core_v0.19.0 (5be962670)", "wheel 0.19.2"),
    on="torchrun -m megatron_prefix.run pretrain_gpt.py ... --prefix-schedule auto",
    loss="loss_mask of the model call",
    together="nothing: samples are dealt out in the order of the data set; a row that packs a whole"
    " group (--sft, --dataloader-inter-document-masking) keeps it together",
    refused=(RESET_MASK, DISTILLATION, LEGACY_MODELS, OWN_CP_LOOP),
    refusal=_refusal,
)
