"""[pure] NeMo-RL, with its Megatron policy worker."""

from __future__ import annotations

from megatron_prefix.trainers.trainer import Trainer

TRAINER = Trainer(
    name="NeMo-RL",
    module="nemo_rl",
    package="nemo-rl",
    tried=("7ea279abf",),
    on="`import megatron_prefix.auto.on_import` at the head of nemo_rl/models/megatron/train.py: no"
    " option of its configuration only imports a module",
    loss="all: its mask (token_mask) stays in the loss, so the output layer runs on prompts too,"
    " once each",
    together="policy.sequence_packing.enabled=false and policy.dynamic_batching.enabled=false, and"
    " whole groups a rank: grpo.num_prompts_per_step a multiple of the data-parallel size; either"
    " of the two deals out by length",
    refused=(
        ("multimodal data", "embeddings that the trainer makes are not supported"),
        ("policy.megatron_cfg.mtp_num_layers", "multi-token prediction is refused"),
    ),
)
