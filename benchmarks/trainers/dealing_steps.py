"""Updates of slime and miles whose rollouts are dealt by them, and then as whole groups.

"static" in a layout's name: microbatches of two rollouts, not of a budget of tokens; "tokens": the
loss is a mean over tokens (`--calculate-per-token-loss`), not over rollouts. Each rank runs its own
part of one batch: stock schedule with the trainer's dealing, stock and prefix schedule with whole
groups. Both are compared with the first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state

from benchmarks.trainers import miles_steps, slime_steps
from megatron_prefix.features.dealing.hooks import deal_after_import
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.schedule import get_forward_backward_func
from tests.core.trainers import worker
from tests.core.trainers.both import CONFIG, Step, flat, furthest, gradients
from tests.core.trainers.cpu_training import run_on_cpu
from tests.core.trainers.verl_steps import GROUPS, PROMPT, SIZE, VOCAB, rollouts, rows

ARGUMENTS = miles_steps.ARGUMENTS  # slime's, with what miles has besides
vars(ARGUMENTS).update(balance_data=False, balance_by_flops=False, max_tokens_per_gpu=150)


def whole_batch() -> dict[str, list[Any]]:
    """What the driver has: columns of all rollouts."""
    tokens, prompts = rollouts(*rows())
    answers = [len(row) - prompt for row, prompt in zip(tokens, prompts, strict=True)]
    return {
        "tokens": tokens, "total_lengths": list(map(len, tokens)), "response_lengths": answers,
        "rollout_ids": list(range(len(tokens))),
    }  # fmt: skip


def dealt(trainer: str) -> tuple[Any, Any]:
    """The trainer's own schedule and the one with whole groups."""
    module = importlib.import_module(f"{trainer}.utils.dp_schedule")
    ranks = parallel_state.get_data_parallel_world_size()
    config = {
        "dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1
    }  # fmt: skip
    data = whole_batch()
    schedules = [
        function(ARGUMENTS, config, data["total_lengths"], global_batch_size=GROUPS * SIZE,
                 rollout_indices=data["rollout_ids"])
        for function in (module.build_dp_schedule.__wrapped__, module.build_dp_schedule)
    ]  # fmt: skip
    return schedules[0], schedules[1]


def on_rank(schedule: Any) -> dict[str, Any]:
    """What the trainer's actor has of the batch on this rank, which is drawn by rollout."""
    parts, places, numbers, sizes = schedule
    rank, whole = parallel_state.get_data_parallel_rank(), whole_batch()
    data = {name: [column[number] for number in parts[rank]] for name, column in whole.items()}
    scores = [[[-2.4, -2.5, 0.5][n] * (1 + row % 3) for n in range(3)] for row in parts[rank]]
    columns = zip(*scores, strict=True)
    for name, values in zip(("log_probs", "ref_log_probs", "advantages"), columns, strict=True):
        pairs = zip(data["response_lengths"], values, strict=True)
        data[name] = [torch.full((answer,), value) for answer, value in pairs]
    data["loss_masks"] = [torch.ones(num, dtype=torch.int) for num in data["response_lengths"]]
    data["rollout_mask_sums"] = [torch.tensor(float(num)) for num in data["response_lengths"]]
    more = {"micro_batch_indices": places[rank], "num_microbatches": numbers, "num_rollouts": sizes}
    return data | more


def updated(trainer: str, chunks: list[Any], schedule: Any, function: Callable[..., Any]) -> Any:
    """What `train_one_step` says, and gradients, with another schedule for Megatron's."""
    held: list[Any] = []

    def kept(**arguments: Any) -> Any:
        results = function(**arguments)
        held.append(gradients(chunks))
        return results

    model: Any = importlib.import_module(f"{trainer}.backends.megatron_utils.model")
    model.get_forward_backward_func = lambda: kept
    model.get_args = lambda: ARGUMENTS
    data, more = on_rank(schedule), () if trainer == "slime" else (None, 0)
    if trainer == "slime":
        reader = importlib.import_module("slime.backends.megatron_utils.data")
        iterators, num = reader.get_data_iterator(data), data["num_microbatches"]
    else:
        reader = importlib.import_module("miles.backends.training_utils.data")
        iterators, num = reader.get_data_iterator(ARGUMENTS, chunks, data)
    optimizer = SimpleNamespace(
        zero_grad=lambda *_, **__: None, step=lambda *_: (True, 0.0, 0), param_groups=[]
    )
    said, *_ = model.train_one_step(
        ARGUMENTS, 0, 0, iterators, chunks, optimizer, SimpleNamespace(step=lambda increment: None),
        num[0], GROUPS * SIZE, *more,
    )  # fmt: skip
    return said, held[0]


def steps(name: str) -> list[Step]:
    """The update with the trainer's dealing, and with whole groups by both schedules."""
    trainer = "slime" if "slime.backends.megatron_utils.model" in sys.modules else "miles"
    layout = worker.layout_of(name)
    runtime.initialize(layout)
    if trainer == "miles":
        miles_steps.prepare()
    else:
        slime_steps.on_cpu()
    ARGUMENTS.use_dynamic_batch_size = "static" not in name
    ARGUMENTS.micro_batch_size = 2 if "static" in name else 1
    ARGUMENTS.calculate_per_token_loss = "tokens" in name
    chunks = build_model(
        resolve("tiny-qwen3", num_layers=2).with_vocab(VOCAB), layout=layout,
        config_overrides={"calculate_per_token_loss": "tokens" in name},
    )  # fmt: skip
    own, whole = dealt(trainer)
    prefix = get_forward_backward_func(prefix_config=CONFIG)
    turns = ((own, stock_schedule()), (whole, stock_schedule()), (whole, prefix))
    expected, *others = (updated(trainer, chunks, *turn) for turn in turns)
    check_whole(own, whole)
    assert prefix.report is not None
    forest = prefix.report.forest
    return [
        Step(
            "update", forest.executed_tokens, forest.raw_tokens,
            tolerance(torch.float32, sum(whole_batch()["total_lengths"])),
            max(furthest(grads, expected[1]) for _, grads in others),
            max(furthest(flat(said), flat(expected[0])) for said, _ in others),
        )
    ]  # fmt: skip


def check_whole(own: Any, whole: Any) -> None:
    """Whether groups are on fewer ranks than before, and each rollout is there once."""
    prompts = [bytes(row[:PROMPT].numpy()) for row in rows()[0]]
    spread = [len({(r, prompts[n]) for r, part in enumerate(dealt[0]) for n in part})
              for dealt in (own, whole)]  # fmt: skip
    assert spread[1] < spread[0], f"groups are on {spread} ranks"
    assert all(sorted(chain(*parts)) == [*range(len(prompts))] for parts in (own[0], whole[0]))
    assert len({len(batches) for batches in whole[1]}) == 1


if __name__ == "__main__":
    deal_after_import()
    run_on_cpu()
    worker.StandIns("wandb", "httpx", *slime_steps.UNUSED)
    its = "slime" if any(path.endswith("/slime") for path in sys.argv[1].split(":")) else "miles"
    worker.main([f"{its}.utils.dp_schedule", f"{its}.backends.megatron_utils.model"], steps)
