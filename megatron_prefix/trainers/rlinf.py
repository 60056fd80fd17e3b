"""[pure] RLinf, with its Megatron workers."""

from __future__ import annotations

from megatron_prefix.refusals.table import RLINF_STAGES
from megatron_prefix.trainers.trainer import Trainer

TRAINER = Trainer(
    name="RLinf",
    module="rlinf.workers.megatron_worker",
    package="rlinf",
    tried=("a3816b596",),
    on="RLINF_EXT_MODULE=megatron_prefix.auto.on_import, which every worker imports at its start",
    loss="all: its mask stays in the loss, so the output layer runs on prompts too, once each",
    together="its rollout workers, which hand over whole groups, without enable_dp_load_balance,"
    " which deals out by length, and with shuffle_rollout off where n_minibatches is above 1",
    refused=(RLINF_STAGES,),
)
