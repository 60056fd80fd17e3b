"""[pure] Megatron-Bridge's own training loop; trainers that only build models with it are not."""

from __future__ import annotations

from megatron_prefix.refusals.table import BRIDGE_TEACHER
from megatron_prefix.trainers.trainer import Trainer

TRAINER = Trainer(
    name="Megatron-Bridge",
    module="megatron.bridge.training.train",
    package="megatron-bridge",
    tried=("067f987df",),
    on="torchrun -m megatron_prefix.run SCRIPT ... --prefix-schedule auto",
    loss="all: its loss_mask stays in the loss, so the output layer runs on prompts too, once each",
    together="nothing: samples are dealt out in the order of the data set; a packed row that has a"
    " whole group keeps it together",
    refused=(BRIDGE_TEACHER,),
)
