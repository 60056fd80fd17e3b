"""[pure] verl, with its Megatron engine."""

from __future__ import annotations

from megatron_prefix.refusals.table import DYNAMIC_CP
from megatron_prefix.trainers.trainer import Trainer

TRAINER = Trainer(
    name="verl",
    module="verl",
    package="verl",
    tried=("0.9.1",),
    on="the package itself, once it is installed: it is a plugin in the group verl.plugins",
    loss="all: its mask (response_mask) stays in the loss, so the output layer runs on prompts too,"
    " once each",
    together="VERL_USE_EXTERNAL_MODULES=megatron_prefix.auto.whole_groups, where the trainer runs:"
    " without it verl deals out by length",
    refused=(DYNAMIC_CP,),
    losses_set=frozenset({"batch_num_tokens"}),  # in global_batch_info of their configuration
    passes_together=True,  # forward_backward_batch reduces over these ranks before each call
)
