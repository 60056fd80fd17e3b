"""[pure] AReaL, with its Megatron engine: read, not run."""

from __future__ import annotations

from megatron_prefix.refusals.table import TREE_TRAINING
from megatron_prefix.trainers.trainer import Trainer

TRAINER = Trainer(
    name="AReaL",
    module="areal.engine.megatron_engine",
    package="areal",
    tried=(),
    on="`import megatron_prefix.auto.on_import` in a module that its workers import",
    loss="all: its mask stays in the loss",
    together="the group_size that its train controller splits by",
    refused=(TREE_TRAINING,),
)
