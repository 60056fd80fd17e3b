"""RLinf's MegatronActor: log-probs, and an update with its policy loss, entropy and KL, packed.

"hot" in a layout's name: sampled at a temperature of 0.9; "critic": its critic's values and loss.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from tests.core.trainers import worker
from tests.core.trainers.both import Both, Step, changed, config_of
from tests.core.trainers.cpu_training import run_on_cpu
from tests.core.trainers.verl_steps import ANSWER, PROMPT, VOCAB, mine

ACTOR = "rlinf.workers.actor.megatron_actor_worker"
CRITIC = "rlinf.workers.critic.megatron_critic_worker"
UNUSED = (
    "ray", "rlinf.scheduler", "rlinf.config", "rlinf.envs", "rlinf.agents", "rlinf.models",
    "rlinf.utils.placement", "rlinf.utils.resharding", "rlinf.workers.rollout",
    "rlinf.utils.initialize", "rlinf.utils.profiler", "rlinf.utils.omega_resolver",
    "rlinf.utils.logging", "rlinf.utils.flops",
)  # fmt: skip


def valued(model: Any) -> None:
    """Gives the last stage the head of RLinf's critic."""
    from rlinf.hybrid_engines.megatron.megatron_model_manager import LinearForLastLayer

    if model.post_process:
        config = model.config
        model.output_layer = LinearForLastLayer(
            config.hidden_size, 1, sequence_parallel=config.sequence_parallel
        )


def batch() -> dict[str, torch.Tensor]:
    """What RLinf's actor gets of its rollouts on this data-parallel rank."""
    ids, mask = mine()
    num = len(ids)
    answered = mask[:, PROMPT:].float()
    return {
        "input_ids": ids, "attention_mask": mask.bool(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "response_mask": mask.bool(),
        "prompt_lengths": mask[:, :PROMPT].sum(1), "response_lengths": mask[:, PROMPT:].sum(1),
        "recomputed_logprobs": torch.full((num, ANSWER), -4.9),
        "ref_logprobs": torch.full((num, ANSWER), -4.8),
        "advantages": torch.linspace(-1, 1, num)[:, None] * answered,
        "returns": torch.linspace(-1, 1, num * ANSWER).view(num, ANSWER),
        "values": torch.full((num, ANSWER), 0.1),
    }  # fmt: skip


def actor_of(name: str, chunks: list[Any]) -> Any:
    """RLinf's actor or critic around a model; its `__init__` would start a worker of its own."""
    from omegaconf import OmegaConf
    from rlinf.utils.utils import masked_mean
    from rlinf.workers.actor.megatron_actor_worker import MegatronActor
    from rlinf.workers.critic.megatron_critic_worker import MegatronCritic

    actor = object.__new__(MegatronCritic if "critic" in name else MegatronActor)
    settings = {
        "runner": {"task_type": "reasoning"},
        "algorithm": {
            "sampling_params": {"temperature": 0.9 if "hot" in name else 1.0},
            "loss_type": "actor", "entropy_bonus": 0.01, "early_stop_imp_ratio": 5.0,
            "use_valid_token_scale": False,
        },
    }  # fmt: skip
    vars(actor).update(
        cfg=OmegaConf.create(settings), model=chunks, transformer_config=unwrap(chunks[0]).config,
        enable_dynamic_batch_size=True, max_tokens_per_mbs=150, response_len=ANSWER,
        variable_seq_lengths=True, calculate_entropy=True, value_clip=0.2,
        calculate_entropy_loss=True, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0,
        kl_beta=0.1, kl_penalty_type="low_var_kl", loss_agg_func=masked_mean, use_profiler=False,
        log_debug=print, log_warning=print,
    )  # fmt: skip
    return actor


def steps(name: str) -> list[Step]:
    """A pass for log-probs and an update, on one rank."""
    from rlinf.utils import distributed
    from rlinf.workers import megatron_worker

    layout = worker.layout_of(name)
    runtime.initialize(layout)
    critic, overrides = "critic" in name, {"variable_seq_lengths": True}
    spec = resolve("tiny-qwen3", num_layers=2, tie_embeddings=not critic).with_vocab(VOCAB)
    with changed(valued) if critic else contextlib.nullcontext():
        chunks = build_model(spec, layout=layout, config_overrides=overrides)
    actor = actor_of(name, chunks)
    distributed.Worker.torch_device_type = "cpu"  # the class is a stand-in
    megatron_worker.get_forward_backward_func = both = Both(config_of(name))
    with torch.no_grad():
        actor.run_forward_backward(batch(), forward_only=True)
    chunks[0].zero_grad_buffer()
    actor.run_forward_backward(batch(), forward_only=False)
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    worker.StandIns(*UNUSED)
    worker.main([ACTOR, CRITIC], steps)
