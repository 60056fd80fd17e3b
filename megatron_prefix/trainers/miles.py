"""[pure] miles, which comes from slime."""

from __future__ import annotations

from megatron_prefix.errors import Refusal
from megatron_prefix.refusals.table import MULTI_LORA
from megatron_prefix.trainers import slime
from megatron_prefix.trainers.megatron_lm import arguments
from megatron_prefix.trainers.trainer import Trainer


def _refusal() -> Refusal | None:
    return MULTI_LORA if getattr(arguments(), "multi_lora", False) else None


TRAINER = Trainer(
    name="miles",
    module="miles",
    package="miles",
    tried=("31f1ca961",),
    on=slime.TRAINER.on,
    loss=slime.TRAINER.loss,
    together=slime.TRAINER.together,
    refused=(MULTI_LORA,),
    passes_together=True,  # forward_only, once for every update; its lengths are of all ranks
    refusal=_refusal,
)
