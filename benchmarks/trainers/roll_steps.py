"""ROLL's Megatron strategy: log-probs, and an update with the loss of its RLVR worker, padded rows.

Its strategy starts with a checkpoint, its own model, DDP and optimizer. "thd" in a layout's name:
with `use_sequence_packing`; "r3": experts, with routes that rollouts bring; "sft": labels at the
model call, and the loss of its SFT worker.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.core.trainers import stand_ins

stand_ins.for_megatron()

from megatron.core.transformer.moe.router_replay import RouterReplay  # noqa: E402

from benchmarks.trainers import recorded  # noqa: E402
from benchmarks.trainers.megatron_lm_steps import take_sequence_parallelism  # noqa: E402
from megatron_prefix.lab import runtime  # noqa: E402
from megatron_prefix.trainers.table import ROLL  # noqa: E402
from tests.core.trainers import engine_routes, worker  # noqa: E402
from tests.core.trainers.both import Both, Step, config_of  # noqa: E402
from tests.core.trainers.cpu_training import run_on_cpu  # noqa: E402
from tests.core.trainers.verl_steps import ANSWER, GROUPS, PROMPT, SIZE, mine  # noqa: E402
from tests.oracle import attention  # noqa: E402

STRATEGY = "roll.distributed.strategy.megatron_strategy"
WORKERS = ("roll.pipeline.rlvr.actor_worker", "roll.pipeline.sft.sft_worker")
UNUSED = ("transfer_queue", "opentelemetry", "pybase64", "imageio")
LENGTH, EXPERTS = PROMPT + ANSWER, 8


def batch(name: str, tables: Callable[[], tuple[torch.Tensor, torch.Tensor]] = mine) -> Any:
    """What ROLL's workers get of its rollouts on this data-parallel rank, or of a data set.

    Args:
        tables: makes tokens and mask, of the rank or of all.
    """
    from roll.distributed.scheduler.protocol import DataProto

    ids, mask = tables()
    starts = mask.argmax(1)
    ids, mask = (
        torch.stack([row.roll(-int(start)) for row, start in zip(table, starts, strict=True)])
        for table in (ids, mask)
    )
    num, prompts = len(ids), PROMPT - starts
    answered = mask * (torch.arange(LENGTH) >= prompts[:, None])
    columns = {"input_ids": ids, "attention_mask": mask}
    if "r3" in name:
        columns["routed_experts"] = routes(ids, mask)
    if "sft" in name:
        labels = torch.where(answered.bool(), ids, -100)
        columns["labels"] = torch.cat([labels[:, 1:], torch.full((num, 1), -100)], 1)
        keys = ["labels"]
    else:
        kept = (torch.arange(num) % 5 > 0)[:, None]  # rollouts that its filters leave
        columns |= {
            "response_mask": answered,
            "final_response_mask": answered[:, 1:] * kept,
            "old_log_probs": torch.full((num, LENGTH - 1), -7.7),
            "ref_log_probs": torch.full((num, LENGTH - 1), -7.6),
            "advantages": torch.linspace(-1, 1, num)[:, None] * answered[:, 1:],
            "train_infer_is_weight": torch.ones(num, LENGTH - 1),
        }
        keys = ["response_mask", "final_response_mask"]
    rows_of_call = SIZE * num // (GROUPS * SIZE)
    return DataProto.from_dict(
        columns,
        meta_info={
            "loss_mask_keys": keys, "micro_batch_size": rows_of_call,
            "is_offload_optimizer_states_in_train_step": False,
        },
    )  # fmt: skip


def routes(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Experts of every token, uint8 [rollouts, positions, layers, experts]; the first ones for each
    rollout's last token, which its engine has not been asked about, and for padding."""
    tokens = [row[: int(kept.sum())] for row, kept in zip(ids, mask, strict=True)]
    prompts = (PROMPT - mine()[1].argmax(1)).tolist()
    drawn = engine_routes.drawn(tokens, prompts, recorded.LAYERS, EXPERTS)
    shape = (*ids.shape, recorded.LAYERS, engine_routes.TOPK)
    found = torch.arange(engine_routes.TOPK).expand(shape).to(torch.uint8).clone()
    for row, own in zip(found, drawn, strict=True):
        row[: len(own)] = own
    return found


def copy_logits(models: list[Any]) -> None:
    """Keeps ROLL's functions from writing into what they get: logits in 16 bit they copy, as they
    compute in fp32; in fp32 its losses fail under either schedule."""
    from roll.distributed.strategy import megatron_strategy

    def copying(stock: Any) -> Any:
        return lambda logits, *rest, **more: stock(logits.clone(), *rest, **more)

    for name in ("vocab_parallel_logprobs", "vocab_parallel_entropy"):
        setattr(megatron_strategy, name, copying(getattr(megatron_strategy, name)))
    for model in models:
        if model.post_process:
            loss = model.compute_language_model_loss
            model.compute_language_model_loss = lambda labels, logits, loss=loss: loss(
                labels, logits.clone()
            )


def settings_of(name: str, folder: Path) -> Any:
    """The configuration of ROLL's worker."""
    from roll.configs.model_args import ModelArguments
    from roll.configs.training_args import TrainingArguments
    from roll.configs.worker_config import RouterReplayConfig, StrategyArguments, WorkerConfig

    layout = worker.layout_of(name)
    parallel = {
        "tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp, "expert_model_parallel_size": 1,
        "sequence_parallel": layout.sequence_parallel, "transformer_impl": "local",
        "variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall", "use_cpu": True,
        "use_distributed_optimizer": False, "accumulate_allreduce_grads_in_fp32": True,
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=10, learning_rate=1e-3, bf16=False,
        per_device_train_batch_size=SIZE // layout.dp, gradient_accumulation_steps=GROUPS,
    )  # fmt: skip
    given = {name: value for name, value in arguments.to_dict().items() if name != "warmup_ratio"}
    arguments.to_dict = lambda: dict(given)  # transformers no longer has that one
    return WorkerConfig(
        name="actor_train", training_args=arguments, use_sequence_packing="thd" in name,
        model_args=ModelArguments(model_name_or_path=str(folder), dtype="fp32"),
        strategy_args=StrategyArguments("megatron_train", parallel),
        router_replay=RouterReplayConfig(mode="R3" if "r3" in name else "disable"),
    )  # fmt: skip


def worker_of(name: str, folder: Path) -> Any:
    """ROLL's worker with its strategy, which begins with the checkpoint in a folder; its `__init__`
    would start a Ray actor."""
    from roll.distributed.executor.worker import RankInfo
    from roll.distributed.strategy import megatron_strategy
    from roll.models import model_providers
    from roll.pipeline.rlvr.actor_worker import ActorWorker
    from roll.pipeline.sft.sft_worker import SFTWorker

    found = object.__new__(SFTWorker if "sft" in name else ActorWorker)
    found.worker_config = settings_of(name, folder)
    found.pipeline_config = SimpleNamespace(
        max_grad_norm=1.0, sequence_length=LENGTH, enable_old_logprobs_recompute=True,
        loss_agg_mode="token-mean", importance_sampling="token", use_pg_clip_range=False,
        pg_clip=0.2, dual_clip_loss=True, use_kl_loss=True, kl_loss_coef=0.1, rl_loss_coef=1.0,
        entropy_loss_coef=0.01, difficulty_loss_weight=False, length_loss_weight=False,
        train_infer_correction=SimpleNamespace(is_weight=SimpleNamespace(enabled=True)),
    )  # fmt: skip
    found.rank_info, found.rank, found._logprobs_cache = RankInfo(), 0, {}
    model_providers.download_model = lambda path, *_: path  # it asks Ray
    megatron_strategy.default_processor_provider = lambda **_: None  # else it is the tokenizer
    found.strategy = megatron_strategy.MegatronTrainStrategy(found)
    found.strategy.initialize(model_providers.default_actor_model_provider)
    found.strategy.load_states = lambda **_: None  # from the host to a GPU
    return found


def steps(name: str) -> list[Step]:
    """A pass for log-probs and an update, on one rank."""
    from roll.distributed.strategy import megatron_strategy

    runtime.initialize(worker.layout_of(name))
    megatron_strategy.get_forward_backward_func = both = Both(config_of(name))
    both.masks_tokens = ROLL.masks_tokens
    both.state = lambda: RouterReplay.global_router_replay_instances
    folder = model_folder(name)
    if torch.distributed.get_rank() == 0:
        recorded.write_model(folder, EXPERTS if "r3" in name else 0)
    torch.distributed.barrier()
    found = worker_of(name, folder)
    strategy = found.strategy
    copy_logits(strategy.models_unwrapped)
    if "thd" not in name:
        for model in strategy.models_unwrapped:
            attention.put_into(model, ignores_masks=True)
    if "sft" not in name:
        with torch.no_grad():
            strategy.forward_step(batch(name), found.forward_func_log_probs)
    for model in strategy.models_wrapped:
        model.zero_grad_buffer()
    strategy.train_step(batch(name), found.loss_func)
    return both.steps


def model_folder(name: str) -> Path:
    """Where the checkpoint is that all ranks begin with, beside ROLL's logs."""
    return Path(os.environ["ROLL_LOG_DIR"]) / ("experts" if "r3" in name else "dense")


if __name__ == "__main__":
    run_on_cpu()
    take_sequence_parallelism()
    worker.StandIns(*UNUSED)
    with tempfile.TemporaryDirectory() as made:
        os.environ["ROLL_LOG_DIR"] = made
        worker.main([STRATEGY, *WORKERS], steps)
