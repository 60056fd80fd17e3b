"""[pure] ROLL, with its Megatron strategy: read, not run, and refused."""

from __future__ import annotations

from megatron_prefix.refusals.table import SHIFTED_MASK
from megatron_prefix.trainers.trainer import Trainer

TRAINER = Trainer(
    name="ROLL",
    module="roll.distributed.strategy.megatron_strategy",
    package="",
    tried=(),
    on="actor_train.worker_cls: a subclass of its worker, in a module that begins with `import"
    " megatron_prefix.auto.on_import`; its strategy asks for the schedule once, at its start",
    loss="loss_mask of the model call, which leaves out the position of the first answer token",
    together="nothing: batch_balance deals out by length",
    refused=(SHIFTED_MASK,),
    # A gradient would reach positions that nobody computes: run/execute/losses.py finds that at a
    # step's end.
    refusal=lambda: SHIFTED_MASK,
)
