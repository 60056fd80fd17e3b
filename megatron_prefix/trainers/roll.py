"""[pure] ROLL, with its Megatron strategy: read, not run, and refused."""

from __future__ import annotations

from megatron_prefix.trainers.trainer import Trainer

_MASK = "the loss_mask of its model calls"
_WHY = "it is over tokens, not over the positions that predict them: shift it by one"

TRAINER = Trainer(
    name="ROLL",
    module="roll.distributed.strategy.megatron_strategy",
    package="",
    tried=(),
    on="actor_train.worker_cls: a subclass of its worker, in a module that begins with `import"
    " megatron_prefix.auto.on_import`; its strategy asks for the schedule once, at its start",
    loss="loss_mask of the model call, which leaves out the position of the first answer token",
    together="nothing: batch_balance deals out by length",
    refused=((_MASK, _WHY),),
    # A gradient would reach positions that nobody computes: losses.py finds that at a step's end.
    refusal=lambda: f"{_MASK}: {_WHY}",
)
