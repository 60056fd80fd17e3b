"""[pure] Megatron-RL: train_rl.py of Megatron-LM."""

from __future__ import annotations

from megatron_prefix.refusals.table import PACKED_BINS_CP
from megatron_prefix.trainers.megatron_lm import arguments
from megatron_prefix.trainers.trainer import Trainer

TRAINER = Trainer(
    name="Megatron-RL",
    module="megatron.rl.rl_utils",
    package="",
    tried=("core_v0.16.1 (55ac70825)",),
    on="torchrun -m megatron_prefix.run train_rl.py ... --prefix-schedule auto",
    loss="all: its mask (packed_loss_mask) stays in the loss, so the output layer runs on prompts"
    " too, once each",
    together="--grpo-prompts-per-step a multiple of the data-parallel size (rollouts are cut into"
    " equal parts in their order), and no --rl-use-sequence-packing, which sorts by length",
    refused=(PACKED_BINS_CP,),
    # megatron.training imports the module in every script.
    is_used=lambda: bool(getattr(arguments(), "perform_rl_step", False)),
)
