"""AReaL's Megatron engine: log-probs, and its actor's update with the decoupled PPO loss, packed.

"value" in a layout's name: its critic's engine, head and loss; "sft": its language-model engine;
"dpo": its engine for pairs. It pads each microbatch to a page of 256 tokens, with a row of zeros.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection
from typing import Any

import torch

from tests.core.trainers import stand_ins

stand_ins.for_megatron()

from megatron_prefix.lab import runtime  # noqa: E402
from megatron_prefix.lab.models.build import build_model, unwrap  # noqa: E402
from megatron_prefix.lab.models.presets import resolve  # noqa: E402
from tests.core.trainers import worker  # noqa: E402
from tests.core.trainers.both import Both, Step, changed, config_of  # noqa: E402
from tests.core.trainers.cpu_training import run_on_cpu  # noqa: E402
from tests.core.trainers.verl_steps import PROMPT, VOCAB, mine  # noqa: E402

ENGINE = "areal.engine.megatron_engine"
UNUSED = (
    "aiohttp", "httpx", "colorlog", "tenacity", "flask", "torchdata", "lark", "uvloop", "hydra",
    "numba", "aiofiles", "openai", "megatron.bridge", "mbridge",
    "swanlab", "trackio", "wandb", "tensorboardX", "pybase64", "areal.utils.printing",
)  # fmt: skip
"""Servers, data loaders and bridges that its modules import."""


def valued(model: Any) -> None:
    """Gives the last stage the head of AReaL's critic."""
    from areal.models.mcore.registry import _replace_output_layer_with_value_head

    if model.post_process:
        _replace_output_layer_with_value_head(model, model.config)


def trajectories(*, in_pairs: bool) -> list[dict[str, torch.Tensor]]:
    """What AReaL's workflows return of the rollouts of this data-parallel rank: one row each.

    Args:
        in_pairs: two rollouts of a prompt, one behind the other.
    """
    ids, mask = mine()
    found = []
    order = (
        sorted(range(len(ids)), key=lambda row: ids[row].tolist()) if in_pairs else range(len(ids))
    )
    for number in order:
        kept = mask[number].bool()
        tokens, answered = ids[number, kept], torch.arange(len(kept))[kept] >= PROMPT
        old = -4.9 * answered.float()
        found.append({
            "input_ids": tokens[None], "attention_mask": torch.ones_like(tokens)[None].bool(),
            "loss_mask": answered.int()[None], "logprobs": old[None],
            "scores": old.roll(-1)[None] + 0.1,
            "versions": torch.where(answered, 0, -1).int()[None],
            "rewards": torch.tensor([number % 3 - 1.0]),
        })  # fmt: skip
    return found


def settings_of(name: str) -> tuple[Any, Any]:
    """The class of AReaL's engine, and its configuration."""
    from areal.api import cli_args
    from areal.engine import megatron_engine as engines

    kinds = {
        "value": (engines.MegatronPPOCritic, cli_args.PPOCriticConfig),
        "sft": (engines.MegatronLMEngine, cli_args.TrainEngineConfig),
        "dpo": (engines.MegatronDPOEngine, cli_args.DPOEngineConfig),
        "": (engines.MegatronPPOActor, cli_args.PPOActorConfig),
    }
    kind, config = next(kinds[word] for word in kinds if word in name)
    given: dict[str, Any] = {"ppo_n_minibatches": 1} if hasattr(config, "ppo_n_minibatches") else {}
    return kind, config(
        experiment_name="tiny", trial_name="tiny", backend="megatron:d1", dtype="float32",
        temperature=0.9, mb_spec=cli_args.MicroBatchSpec(max_tokens_per_mb=256),
        optimizer=cli_args.OptimizerConfig(), is_critic="value" in name, **given,
    )  # fmt: skip


def engine_of(name: str, chunks: list[Any], layout: Any) -> Any:
    """AReaL's engine around a model, with its optimizer; `initialize` would build one of both."""
    from areal.api import FinetuneSpec, ParallelStrategy
    from areal.engine import megatron_engine as engines

    kind, settings = settings_of(name)
    engine = kind(settings)
    engine.device, engine.rank = torch.device("cpu"), torch.distributed.get_rank()
    engine.logger = engines.logging.getLogger("engine")
    engine.parallel_strategy = engine._make_parallel_strategy(
        ParallelStrategy(
            tensor_parallel_size=layout.tp, pipeline_parallel_size=layout.pp,
            context_parallel_size=layout.cp, data_parallel_size=layout.dp,
        )
    )  # fmt: skip
    for chunk in chunks if len(chunks) > 1 else ():
        chunk.vp_stage = unwrap(chunk).vp_stage
    engine.model = engines._MegatronModelList(chunks)
    engine.tf_config = unwrap(chunks[0]).config
    engine.use_padded_seq = False  # since 2.0; `initialize` asks the kind of model
    engine._create_optimizer(FinetuneSpec(1, 1000, 1))
    engine._initialized = True
    return engine


def kept_by(both: Both, forward_backward: Callable[..., None]) -> Callable[..., None]:
    """AReaL's `forward_backward_batch`, of whose losses `both` compares what they keep: its results
    are empty."""
    from areal.utils.stats_tracker import DEFAULT_TRACKER

    def watched(
        mb_list: Any, process_output_fn: Any, forward_only: bool = False, **options: Any
    ) -> None:
        kept = inspect.getclosurevars(process_output_fn).nonlocals.get("outputs", [])
        before = DEFAULT_TRACKER.export(reset=False)
        both.state = lambda: [kept, DEFAULT_TRACKER]
        both.left = lambda: [kept[:], statistics(DEFAULT_TRACKER, before)]
        forward_backward(mb_list, process_output_fn, forward_only, **options)

    return watched


def statistics(tracker: Any, before: Collection[str]) -> dict[str, float]:
    """What AReaL logs of an update's losses, without what it counts.

    Args:
        before: names of what was there before.
    """
    found = tracker.export(reset=False)
    names = [name for name in found if name not in before]
    return {name: found[name] for name in names if name.endswith(("/avg", "/min", "/max"))}


def train(engine: Any, name: str, data: list[dict[str, Any]], *, scores: bool) -> None:
    """What AReaL's trainers call of an engine in a step.

    Args:
        scores: whether log-probs and values are computed; before 2.0 that pass fails with context
            parallelism under Megatron's schedule, too: its labels are those of all ranks.
    """
    if "sft" in name:
        engine.train_lm(data)
        return
    score = engine.compute_values if "value" in name else engine.compute_logp
    found = score(data) if scores else [one["scores"] for one in data]
    for one, values in zip(data, found, strict=True):
        one["scores"] = values
    if "dpo" in name:
        for one in data:  # the reference model is another one
            one["ref_logprobs"] = one["scores"] + torch.linspace(-3, 2, one["scores"].shape[1])
        engine.train_dpo(data)
    elif "value" in name:
        for one in data:
            one["values"], one["returns"] = one["scores"], one["scores"] + 1
        engine.ppo_update(data)
    else:
        for one in data:
            one["prox_logp"] = one["scores"]
        engine.ppo_update(engine.compute_advantages(data))


def steps(name: str) -> list[Step]:
    """Log-probs (or values) and an update, on one rank."""
    from areal.engine import megatron_engine

    layout = worker.layout_of(name)
    runtime.initialize(layout)
    value = "value" in name
    layers = 4 if "vpp" in name else 2
    spec = resolve("tiny-qwen3", num_layers=layers, tie_embeddings=not value).with_vocab(VOCAB)
    with changed(valued) if value else contextlib.nullcontext():
        chunks = build_model(
            spec, layout=layout, use_distributed_optimizer=True,
            config_overrides={"variable_seq_lengths": True},
        )  # fmt: skip
    both = Both(config_of(name))
    megatron_engine.get_forward_backward_func = both
    engine = engine_of(name, chunks, layout)
    gathers = "gather_cp_output" in inspect.signature(engine.forward_backward_batch).parameters
    engine.forward_backward_batch = kept_by(both, engine.forward_backward_batch)
    data = trajectories(in_pairs="dpo" in name)
    train(engine, name, data, scores=layout.cp == 1 or gathers)
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    worker.StandIns(*UNUSED)
    logging.raiseExceptions = False  # its formatter is one of them
    worker.main([ENGINE, "areal.trainer"], steps)
