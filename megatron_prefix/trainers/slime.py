"""[pure] slime."""

from __future__ import annotations

from megatron_prefix.refusals.table import ALLGATHER_CP
from megatron_prefix.trainers.trainer import Trainer

TRAINER = Trainer(
    name="slime",
    module="slime",
    package="slime",
    tried=("624b824a8",),
    on="--custom-megatron-init-path megatron_prefix.auto.init",
    loss="loss_mask of the model call",
    together="--micro-batch-size of a whole group (--n-samples-per-prompt) and no"
    " --use-dynamic-batch-size; with it samples are packed by length and packs dealt out",
    refused=(ALLGATHER_CP,),
    passes_together=True,  # forward_only calls once for every update that follows
)
