"""Updates of ROLL whose rollouts are dealt by it, and then as whole groups.

"tokens" in a layout's name: the loss is a mean over tokens, and over rollouts otherwise; "thd":
with `use_sequence_packing`. Each rank runs its own part of one batch, as its worker shuffles it:
stock schedule with ROLL's dealing, stock and prefix schedule with whole groups. Both are compared
with the first: gradients, sums of losses, and log-probs in the order of the batch.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state

from benchmarks.trainers import recorded, roll_steps
from benchmarks.trainers.megatron_lm_steps import take_sequence_parallelism
from megatron_prefix.features.dealing.hooks import deal_after_import
from megatron_prefix.lab import runtime
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.schedule import get_forward_backward_func
from megatron_prefix.trainers.table import ROLL
from tests.core.trainers import worker
from tests.core.trainers.both import CONFIG, Step, furthest, gradients
from tests.core.trainers.cpu_training import run_on_cpu
from tests.core.trainers.verl_steps import GROUPS, SIZE, rows
from tests.oracle import attention

NUMBER = GROUPS * SIZE


class Pipeline:
    """ROLL's, as far as it balances."""

    def __init__(self, found: Any) -> None:
        found.worker_config.strategy_args.strategy_config["moe_aux_loss_coeff"] = 0
        self.pipeline_config = SimpleNamespace(
            seed=42, actor_train=found.worker_config, **vars(found.pipeline_config)
        )

    def balanced(self, name: str, *, whole: bool, update: bool) -> Any:
        """The batch on the driver; with "prompt_id" rollouts' numbers, as ROLL has it."""
        from roll.utils import functionals

        batch = roll_steps.batch(name, rows)
        batch.batch["prompt_id"] = torch.arange(NUMBER)
        balance = functionals.batch_balance if whole else functionals.batch_balance.__wrapped__
        prefix = "global_seqlen/actor_train" if update else "global_seqlen"
        balance(batch, parallel_state.get_data_parallel_world_size(), NUMBER, logging_prefix=prefix)
        return batch

    def part(self, batch: Any) -> Any:
        """This rank's."""
        size = parallel_state.get_data_parallel_world_size()
        return batch.chunk(size)[parallel_state.get_data_parallel_rank()]


def run(name: str, found: Any, schedule: Any, *, whole: bool) -> dict[str, Any]:
    """Gradients, sums of all ranks' losses, and log-probs by rollout."""
    pipeline, strategy = Pipeline(found), found.strategy
    held: list[Any] = []

    def kept(**arguments: Any) -> Any:
        results = schedule(**arguments)
        held.append(gradients(strategy.models_wrapped))
        return results

    strategy.forward_backward_func = kept
    scored = pipeline.part(pipeline.balanced(name, whole=whole, update=False))
    with torch.no_grad():
        said = strategy.forward_step(scored, found.forward_func_log_probs)
    part = pipeline.part(pipeline.balanced(name, whole=whole, update=True))
    (mini_batch,) = part.make_iterator(
        mini_batch_size=len(part), epochs=1, seed=42, dataloader_kwargs={"shuffle": True}
    )
    groups = [prompts()[number] for number in mini_batch.batch["prompt_id"].tolist()]
    assert not whole or len(list(itertools.groupby(groups))) == len(set(groups)), "siblings apart"
    for model in strategy.models_wrapped:
        model.zero_grad_buffer()
    losses = strategy.train_step(mini_batch, found.loss_func)
    sums = {
        key: torch.tensor(values).sum() for key, values in losses.items() if key.endswith("@sum")
    }
    table = torch.zeros(NUMBER, roll_steps.LENGTH - 1)
    if said:
        table[scored.batch["prompt_id"]] = said["log_probs"].float()
    for value in (table, *sums.values()):
        torch.distributed.all_reduce(value, group=parallel_state.get_data_parallel_group())
    return {"gradients": held[-1], "results": {"log_probs": table, **sums}}


def steps(name: str) -> list[Step]:
    """The passes with ROLL's dealing, and with whole groups by both schedules."""
    runtime.initialize(worker.layout_of(name))
    folder = roll_steps.model_folder(name)
    if torch.distributed.get_rank() == 0:
        recorded.write_model(folder)
    torch.distributed.barrier()
    found = roll_steps.worker_of(name, folder)
    found.pipeline_config.loss_agg_mode = (
        "token-mean" if "tokens" in name else "seq-mean-token-mean"
    )
    roll_steps.copy_logits(found.strategy.models_unwrapped)
    if "thd" not in name:
        for model in found.strategy.models_unwrapped:
            attention.put_into(model, ignores_masks=True)
    found.strategy.optimizer.step = lambda: (True, 0.0, 0)  # all runs begin with the same weights
    prefix = get_forward_backward_func(prefix_config=CONFIG, masks_tokens=ROLL.masks_tokens)
    check_whole(name, Pipeline(found))
    own = run(name, found, stock_schedule(), whole=False)
    others = [run(name, found, schedule, whole=True) for schedule in (stock_schedule(), prefix)]
    assert prefix.report is not None
    forest = prefix.report.forest
    return [
        Step(
            "update", forest.executed_tokens, forest.raw_tokens,
            tolerance(torch.float32, int(rows()[1].sum())),
            max(furthest(other["gradients"], own["gradients"]) for other in others),
            max(furthest(other["results"], own["results"]) for other in others),
        )
    ]  # fmt: skip


def prompts() -> list[bytes]:
    """How rollouts begin."""
    return [bytes(row[mask.bool()][:8].numpy()) for row, mask in zip(*rows(), strict=True)]


def check_whole(name: str, pipeline: Pipeline) -> None:
    """Whether groups are on fewer ranks than before, and each rollout is there once."""
    ranks = parallel_state.get_data_parallel_world_size()
    for update in (False, True):
        spread = []
        for whole in (False, True):
            numbers = pipeline.balanced(name, whole=whole, update=update).batch["prompt_id"]
            assert sorted(numbers.tolist()) == list(range(NUMBER))
            parts = numbers.chunk(ranks)
            spread.append(sum(len({prompts()[n] for n in part.tolist()}) for part in parts))
        assert spread[1] < spread[0], f"groups are on {spread} ranks"


if __name__ == "__main__":
    deal_after_import()
    run_on_cpu()
    take_sequence_parallelism()
    worker.StandIns(*roll_steps.UNUSED)
    with tempfile.TemporaryDirectory() as made:
        os.environ["ROLL_LOG_DIR"] = made
        worker.main([roll_steps.STRATEGY, *roll_steps.WORKERS], steps)
