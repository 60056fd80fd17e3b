"""Mini-batches of AReaL's actor that are dealt by it, and then as whole groups.

"value" in a layout's name: of its critic. Without steps of its optimizer the gradients of all
mini-batches, each times what its loss is divided by, add up to the same sum, and so do losses: by
the stock schedule with AReaL's mini-batches, and by the stock and the prefix schedule with whole
groups.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from megatron.core import parallel_state

from benchmarks.trainers import areal_steps
from megatron_prefix.features.dealing.hooks import deal_after_import
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.schedule import get_forward_backward_func
from tests.core.trainers import worker
from tests.core.trainers.both import CONFIG, Step, changed, furthest, gradients
from tests.core.trainers.cpu_training import run_on_cpu
from tests.core.trainers.verl_steps import GROUPS, VOCAB

LOSS = "_compute_logprobs_and_loss"


class Watched:
    """AReaL's engine, with a schedule instead of Megatron's, and no optimizer.

    Attributes:
        gradients: of all mini-batches, times weights.
        losses: of this rank, times weights.
        weight: what the mini-batch's loss is divided by.
        executed, raw: tokens of shared mini-batches.
    """

    def __init__(self, engine: Any, schedule: Any) -> None:
        from areal.engine import megatron_engine

        self._engine, self._schedule = engine, schedule
        self.gradients: dict[str, torch.Tensor] = {}
        self.losses = torch.zeros(())
        self.executed = self.raw = 0
        self.weight = torch.ones(())
        self._loss = getattr(type(engine), LOSS)
        setattr(engine, LOSS, self._weighed)
        engine.optimizer_step = self._stepped
        megatron_engine.get_forward_backward_func = lambda: self._run
        megatron_engine.compute_total_loss_weight = self._weight

    def _run(self, **arguments: Any) -> Any:
        results = self._schedule(**arguments)
        report = getattr(self._schedule, "report", None)
        if report is not None:
            self.executed += report.forest.executed_tokens
            self.raw += report.forest.raw_tokens
        return results

    def _weight(self, *args: Any) -> torch.Tensor:
        from areal.engine.core.train_engine import compute_total_loss_weight

        self.weight = compute_total_loss_weight(*args)
        return self.weight

    def _weighed(self, *args: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = self._loss(self._engine, *args, **options)
        self.losses = self.losses + loss.detach() * self.weight / options["loss_multiplier"]
        return loss

    def _stepped(self) -> dict[str, float]:
        for name, gradient in gradients(list(self._engine.model)).items():
            weighed = gradient * self.weight
            self.gradients[name] = self.gradients.get(name, torch.zeros(())) + weighed
        return {}


def run(engine: Any, name: str, schedule: Any, *, whole: bool) -> Watched:
    """An update with AReaL's mini-batches or with those of whole groups."""
    from areal.trainer.ppo import actor, critic

    watched = Watched(engine, schedule)
    split = actor.split_padded_tensor_dict_into_mb_list
    if not whole:
        for module in (actor, critic):
            module.split_padded_tensor_dict_into_mb_list = split.__wrapped__
    areal_steps.train(engine, name, areal_steps.trajectories(in_pairs=False), scores=False)
    for module in (actor, critic):
        module.split_padded_tensor_dict_into_mb_list = split
    torch.distributed.all_reduce(watched.losses, group=parallel_state.get_data_parallel_group())
    return watched


def steps(name: str) -> list[Step]:
    """The update with AReaL's mini-batches, and with whole groups by both schedules."""
    layout, value = worker.layout_of(name), "value" in name
    runtime.initialize(layout)
    spec = resolve("tiny-qwen3", num_layers=2, tie_embeddings=not value).with_vocab(VOCAB)
    with changed(areal_steps.valued) if value else contextlib.nullcontext():
        chunks = build_model(
            spec, layout=layout, use_distributed_optimizer=True,
            config_overrides={"variable_seq_lengths": True},
        )  # fmt: skip
    engine = areal_steps.engine_of(name, chunks, layout)
    engine.config.ppo_n_minibatches = GROUPS if layout.dp == 1 else 2
    prefix = get_forward_backward_func(prefix_config=CONFIG)
    own = run(engine, name, stock_schedule(), whole=False)
    shared = run(engine, name, prefix, whole=False)
    others = [run(engine, name, schedule, whole=True) for schedule in (stock_schedule(), prefix)]
    counts = [shared.executed, others[1].executed]
    assert counts[1] < counts[0], f"{counts} tokens are executed: groups are apart as before"
    return [
        Step(
            "update", others[1].executed, others[1].raw,
            tolerance(torch.float32, others[1].raw),
            max(furthest(other.gradients, own.gradients) for other in others),
            max(furthest({"": other.losses}, {"": own.losses}) for other in others),
        )
    ]  # fmt: skip


if __name__ == "__main__":
    deal_after_import()
    run_on_cpu()
    worker.StandIns(*areal_steps.UNUSED)
    logging.raiseExceptions = False  # its formatter is one of them
    worker.main([areal_steps.ENGINE, "areal.trainer"], steps)
