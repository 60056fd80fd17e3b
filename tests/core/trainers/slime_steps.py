"""slime's forward_only and train_one_step: log-probs, and an update with its policy loss.

"replay" in a layout's name: experts, with slime's own queue of routes, which log-probs record;
"value": its critic's head, values and loss; "sft": its loss on answers of several turns.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe import router

from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.optimizer import build_optimizer
from megatron_prefix.lab.models.presets import resolve
from tests.core.trainers import worker
from tests.core.trainers.both import Both, Step, changed, config_of
from tests.core.trainers.megatron_lm_steps import run_on_cpu
from tests.core.trainers.verl_steps import GROUPS, PROMPT, SIZE, VOCAB, rows

MICROBATCHES = [[0, 1, 2], [3, 4, 5, 6], [7, 8], [9, 10, 11]]
ARGUMENTS = Namespace(
    rollout_temperature=0.9, use_rollout_entropy=True, log_probs_chunk_size=-1,
    data_pad_size_multiplier=8, allgather_cp=False, rollout_top_p=1.0,
    seq_length=64, micro_batch_size=1, decoder_seq_length=None, use_dynamic_batch_size=True,
    loss_type="policy_loss", recompute_loss_function=False, calculate_per_token_loss=False,
    advantage_estimator="grpo", eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None,
    entropy_coef=0.01, use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=0.1,
    use_unbiased_kl=False, use_rollout_logprobs=False, use_opsm=False, use_tis=False,
    get_mismatch_metrics=False, save_debug_train_data=None, enable_mtp_training=False,
    ci_test=False, check_for_nan_in_loss_and_grad=True, custom_pg_loss_reducer_function_path=None,
    custom_megatron_before_log_prob_hook_path=None,
    custom_megatron_before_train_step_hook_path=None,
)  # fmt: skip


def rollout_data(*, turns: bool = False) -> dict[str, Any]:
    """What slime's actor has of a rollout on one rank; in `turns` every third token of an answer is
    not the model's."""
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    ids, mask = rows()
    tokens = [row[held.bool()] for row, held in zip(ids, mask, strict=True)]
    answers = [int(held[PROMPT:].sum()) for held in mask]
    totals = [len(one) for one in tokens]

    def column(value: float) -> list[torch.Tensor]:
        return [
            slice_log_prob_with_cp(torch.full((answer,), value * (1 + n % 3)), total, answer)
            for n, (total, answer) in enumerate(zip(totals, answers, strict=True))
        ]

    return {
        "tokens": tokens, "total_lengths": totals, "response_lengths": answers,
        "loss_masks": [_mask(answer, turns=turns) for answer in answers],
        "rollout_mask_sums": [torch.tensor(float(answer)) for answer in answers],
        "log_probs": column(-2.4), "ref_log_probs": column(-2.5), "advantages": column(0.5),
        "values": column(0.1), "returns": column(0.3),
        "micro_batch_indices": MICROBATCHES,
    }  # fmt: skip


def _mask(answer: int, *, turns: bool) -> torch.Tensor:
    mask = torch.ones(answer)
    if turns:
        mask[1:-1:3] = 0
    return mask


def valued(model: Any) -> None:
    """Gives the last stage the head of slime's critic."""
    from slime.backends.megatron_utils.model_provider import LinearForLastLayer

    if model.post_process:
        model.output_layer = LinearForLastLayer(model.config.hidden_size, 1, config=model.config)


def replay_routes(chunk: Any) -> None:
    """What slime's patch of Megatron does: a queue for every router, used inside the top-k.

    Megatron asks an object for the top-k, where there is one; slime's answers in its place.
    """
    from slime.utils import routing_replay

    os.environ["ENABLE_ROUTING_REPLAY"] = "1"
    stock = router.topk_routing_with_score_function

    def topk(scores: Any, num: int, groups: Any, group_topk: Any, topk: Any) -> Any:
        ours = routing_replay.get_routing_replay_compute_topk(topk)
        return ours(scores, num, groups, group_topk)

    def routed(*args: Any, **options: Any) -> Any:
        queue = SimpleNamespace(get_replay_topk=topk)
        return stock(*args, **options | {"router_replay": queue})

    router.topk_routing_with_score_function = routed
    routing_replay.RoutingReplay.record = lambda self, indices: self.top_indices_list.append(
        indices.clone()  # slime pins a copy
    )
    for module in chunk.modules():
        if isinstance(module, router.TopKRouter):
            routing_replay.register_routing_replay(module)


def steps(name: str) -> list[Step]:
    """A pass for log-probs and an update, on one rank."""
    from slime.backends.megatron_utils import model as slime_model
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_values
    from slime.utils import accelerator
    from slime.utils.routing_replay import RoutingReplay

    layout = worker.layout_of(name)
    runtime.initialize(layout)
    accelerator.device = accelerator.current_device = lambda: torch.device("cpu")
    replay, critic = "replay" in name, "value" in name
    tied = {} if replay else {"tie_embeddings": not critic}  # a head is not the embedding
    spec = resolve("tiny-moe" if replay else "tiny-qwen3", num_layers=2, **tied).with_vocab(VOCAB)
    with changed(valued) if critic else contextlib.nullcontext():
        chunks = build_model(spec, layout=layout, config_overrides={"variable_seq_lengths": True})
    ARGUMENTS.loss_type, ARGUMENTS.value_clip = "value_loss" if critic else "policy_loss", 0.2
    if "sft" in name:
        ARGUMENTS.loss_type = "sft_loss"
    both = Both(config_of(name), state=lambda: RoutingReplay.all_routing_replays)
    if replay:
        replay_routes(chunks[0])
    os.environ["ROUTING_REPLAY_STAGE"] = "record"  # as slime's actor sets it
    slime_model.get_forward_backward_func = both
    slime_model.get_args = lambda: ARGUMENTS
    iterators = get_data_iterator(rollout_data(turns="sft" in name))
    num = len(MICROBATCHES)
    with torch.no_grad():
        read = get_values if critic else get_log_probs_and_entropy
        slime_model.forward_only(read, ARGUMENTS, chunks, iterators, [num])
    for iterator in iterators:
        iterator.reset()
    os.environ["ROUTING_REPLAY_STAGE"] = "replay_backward"
    slime_model.train_one_step(
        ARGUMENTS, 0, 0, iterators, chunks, build_optimizer(chunks),
        SimpleNamespace(step=lambda increment: None), num, GROUPS * SIZE,
    )  # fmt: skip
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    worker.StandIns("wandb", "httpx")
    worker.main(["slime.backends.megatron_utils.model"], steps)
