"""[pure] SkyRL, with its Megatron workers."""

from __future__ import annotations

from megatron_prefix.refusals.table import SKYRL_ROWS
from megatron_prefix.trainers.trainer import Trainer

TRAINER = Trainer(
    name="SkyRL",
    module="skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper",
    package="skyrl",
    tried=("a9564572e",),
    on="a module that its workers import, e.g. that of a policy worker of one's own, which begins"
    " with `import megatron_prefix.auto.on_import`",
    loss="all: its mask stays in the loss, so the output layer runs on prompts too, once each",
    together="its dispatch, which cuts a mini-batch into equal parts in the order of its rollouts:"
    " a group is split only where one of these cuts is inside of it",
    refused=(SKYRL_ROWS,),
)
