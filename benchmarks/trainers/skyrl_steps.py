"""SkyRL's MegatronModelWrapper: log-probs, and an update with its policy loss and KL, packed.

"unpacked" in a layout's name: without `remove_microbatch_padding`, with a mask at the model call;
"fused": with `fused_lm_head_logprob`, which wants Megatron-Core 0.18 or newer (`output_processor`);
"r3": experts, with routes that rollouts bring; "recompute": with full activation recomputation.
"""

from __future__ import annotations

import typing
from typing import Any

import torch
import typing_extensions

from tests.core.trainers import stand_ins

stand_ins.for_megatron()

from megatron.core.transformer.moe.router_replay import RouterReplay  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402

from megatron_prefix.lab import runtime  # noqa: E402
from megatron_prefix.lab.models.build import build_model  # noqa: E402
from megatron_prefix.lab.models.presets import resolve  # noqa: E402
from tests.core.trainers import worker  # noqa: E402
from tests.core.trainers.both import Both, Step, config_of  # noqa: E402
from tests.core.trainers.cpu_training import run_on_cpu  # noqa: E402
from tests.core.trainers.verl_steps import (  # noqa: E402
    ANSWER,
    PROMPT,
    SIZE,
    VOCAB,
    drawn_routes,
    rows,
)
from tests.oracle import attention  # noqa: E402

WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"


def microbatches(spec: Any) -> list[dict[str, Any]]:
    """What SkyRL's worker gives the wrapper; three microbatches of four rollouts. With routes for a
    model with experts."""
    ids, mask = rows()
    num = len(ids)
    answered = mask[:, PROMPT:].float()
    columns = {
        "sequences": ids, "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "old_action_log_probs": torch.full((num, ANSWER), -4.9),
        "base_action_log_probs": torch.full((num, ANSWER), -4.8),
        "rollout_action_logprobs": torch.full((num, ANSWER), -4.85),
        "advantages": torch.linspace(-1, 1, num)[:, None] * answered / answered.sum(),
        "loss_mask": answered, "response_mask": mask[:, PROMPT:],
    }  # fmt: skip
    absent: dict[str, Any] = {"rollout_expert_indices": None}
    if spec.num_moe_experts:  # SkyRL's padding: the first experts, masked
        absent, routes = {}, drawn_routes(spec)
        table = torch.arange(routes[0].shape[-1]).expand(*ids.shape, *routes[0].shape[1:]).clone()
        padded = torch.ones_like(mask)
        for row, own in enumerate(routes):
            start = int(mask[row].argmax())
            table[row, start : start + len(own)], padded[row, start : start + len(own)] = own, 0
        columns |= {"rollout_expert_indices": table, "router_padding_mask": padded.bool()}
    found = [
        {name: column[start : start + SIZE] for name, column in columns.items()}
        | {"num_actions": ANSWER, "num_microbatches": num // SIZE, **absent}
        for start in range(0, num, SIZE)
    ]
    return found if absent else list(map(with_packed_routes, found))


def with_packed_routes(batch: dict[str, Any]) -> dict[str, Any]:
    """Since 0.4 routes are those of tokens, one rollout's behind the other's."""
    try:
        from skyrl.backends.skyrl_train.utils.packed_tensor import PackedTensor
    except ImportError:
        return batch
    rows_of = zip(batch["rollout_expert_indices"], batch["attention_mask"].bool(), strict=True)
    packed = PackedTensor.from_segments([table[is_token] for table, is_token in rows_of])
    return {**batch, "rollout_expert_indices": packed}


def steps(name: str) -> list[Step]:
    """A pass for log-probs and an update, on one rank."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss
    from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper
    from skyrl.train.config import TrainerConfig

    layout = worker.layout_of(name)
    runtime.initialize(layout)
    kind = "tiny-moe" if "r3" in name else "tiny-qwen3"
    spec = resolve(kind, num_layers=2).with_vocab(VOCAB)
    overrides: dict[str, Any] = {"variable_seq_lengths": True}
    if "r3" in name:  # SkyRL's default balances nothing
        overrides |= {"moe_enable_routing_replay": True, "moe_aux_loss_coeff": 0.0}
    recompute = "full" if "recompute" in name else "none"
    (chunk,) = build_model(spec, layout=layout, recompute=recompute, config_overrides=overrides)
    packed = "unpacked" not in name
    if not packed:
        attention.put_into(chunk, ignores_masks=True)
    config = TrainerConfig(
        strategy="megatron", remove_microbatch_padding=packed,
        fused_lm_head_logprob="fused" in name,
    )  # fmt: skip
    settings = get_model_config(chunk)
    reduce = settings.finalize_model_grads_func
    wrapper = megatron_model_wrapper.MegatronModelWrapper(
        config, [chunk], policy_loss_fn=ppo_policy_loss
    )
    settings.finalize_model_grads_func = reduce  # SkyRL puts it off until its optimizer's step
    megatron_model_wrapper.get_forward_backward_func = both = Both(config_of(name))
    both.state = lambda: RouterReplay.global_router_replay_instances
    both.leaves_alike = "recompute" in name
    given = microbatches(spec)
    with torch.no_grad():
        wrapper.forward(given, PROMPT + ANSWER, SIZE, temperature=0.9)
    chunk.zero_grad_buffer()
    wrapper.forward_backward_mini_batch(given, PROMPT + ANSWER, SIZE, temperature=0.9)
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]  # pydantic, before 3.12
    stand_ins.where_missing("loguru", "jaxtyping", "cloudpathlib", "megatron.bridge")
    worker.main([WRAPPER], steps)
