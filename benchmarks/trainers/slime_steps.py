"""slime's forward_only and train_one_step: log-probs, and an update with its policy loss.

"replay" in a layout's name: experts, with slime's own queue of routes, which log-probs record;
"r3": the same, and its actor fills the queue with routes that rollouts bring; "recompute": with
full activation recomputation; with "dp2" each rank has every other rollout of a microbatch;
"dsa": its own sparse attention, in contiguous parts of packs;
"value": its critic's head, values and loss; "sft": its loss on answers of several turns; "mtp":
with two layers of multi-token prediction, for which Megatron must be changed as it is for slime.
"""

from __future__ import annotations

import contextlib
import functools
import os
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import router
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Log

from benchmarks.trainers import own_sparse
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.optimizer import build_optimizer
from megatron_prefix.lab.models.presets import resolve
from tests.core.trainers import worker
from tests.core.trainers.both import Both, Step, changed, config_of
from tests.core.trainers.cpu_training import run_on_cpu
from tests.core.trainers.verl_steps import (
    GROUPS,
    PROMPT,
    SIZE,
    VOCAB,
    check_shared,
    drawn_routes,
    mine,
    rollouts,
)

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
    value_clip=0.2, ci_test=False, check_for_nan_in_loss_and_grad=True,
    custom_pg_loss_reducer_function_path=None,
    custom_megatron_before_log_prob_hook_path=None,
    custom_megatron_before_train_step_hook_path=None,
)  # fmt: skip


UNUSED = (
    "ray", "torch_memory_saver", "sglang", "sglang_router", "megatron.bridge", "mbridge",
    "slime.backends.megatron_utils.update_weight", "slime.backends.megatron_utils.initialize",
    "slime.backends.megatron_utils.hf_checkpoint_saver", "slime.ray.train_actor",
)  # fmt: skip
"""What slime's actor imports besides; of the actor only `fill_routing_replay` runs."""


def rollout_data(cut: Callable[..., torch.Tensor], *, turns: bool = False) -> dict[str, Any]:
    """What slime's actor has of a rollout on one rank; in `turns` every third token of an answer is
    not the model's.

    Args:
        cut: its `slice_log_prob_with_cp`.
    """
    ids, mask = mine()
    tokens, _ = rollouts(ids, mask)
    answers = [int(held[PROMPT:].sum()) for held in mask]
    totals = [len(one) for one in tokens]

    def column(value: float) -> list[torch.Tensor]:
        return [
            cut(torch.full((answer,), value * (1 + n % 3)), total, answer)
            for n, (total, answer) in enumerate(zip(totals, answers, strict=True))
        ]

    return {
        "tokens": tokens, "total_lengths": totals, "response_lengths": answers,
        "loss_masks": [_mask(answer, turns=turns) for answer in answers],
        "rollout_mask_sums": [torch.tensor(float(answer)) for answer in answers],
        "log_probs": column(-2.4), "ref_log_probs": column(-2.5), "advantages": column(0.5),
        "values": column(0.1), "returns": column(0.3),
        "micro_batch_indices": microbatches(len(tokens)),
    }  # fmt: skip


def microbatches(num: int) -> list[list[int]]:
    """The rollouts of each."""
    return [[row for row in batch if row < num] for batch in MICROBATCHES if batch[0] < num]


def fill_queues(chunks: list[Any], iterators: list[Any], data: dict[str, Any], spec: Any) -> Any:
    """slime's own way to give routers the routes of rollouts, and those."""
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    routes = drawn_routes(spec)
    data["rollout_routed_experts"] = [one.int() for one in routes]
    args = Namespace(
        num_experts=spec.num_moe_experts, data_pad_size_multiplier=8,
        allgather_cp=ARGUMENTS.allgather_cp,
        sequence_parallel=unwrap(chunks[0]).config.sequence_parallel,
    )  # fmt: skip
    actor = SimpleNamespace(args=args, model=chunks)
    num = [len(microbatches(len(data["tokens"])))]
    MegatronTrainRayActor.fill_routing_replay(actor, iterators, num, data)
    return routes


def _mask(answer: int, *, turns: bool) -> torch.Tensor:
    mask = torch.ones(answer)
    if turns:
        mask[1:-1:3] = 0
    return mask


def valued(head: Any, model: Any) -> None:
    """Gives the last stage the head of slime's critic."""
    if model.post_process:
        model.output_layer = head(model.config.hidden_size, 1, config=model.config)


def replay_routes(chunk: Any, topk_of: Any, register: Any, queue: Any) -> None:
    """What slime's patch of Megatron does: a queue for every router, used inside the top-k.

    Megatron asks an object for the top-k, where there is one; slime's answers in its place.

    Args:
        topk_of: slime's, gets Megatron's top-k.
        register: makes a router's queue.
        queue: the class of queues.
    """
    stock = router.topk_routing_with_score_function

    def topk(scores: Any, num: int, groups: Any, group_topk: Any, topk: Any) -> Any:
        return topk_of(topk)(scores, num, groups, group_topk)

    def routed(*args: Any, **options: Any) -> Any:
        asked = SimpleNamespace(get_replay_topk=topk)
        return stock(*args, **options | {"router_replay": asked})

    router.topk_routing_with_score_function = routed
    queue.record = lambda self, indices: self.top_indices_list.append(
        indices.clone()  # slime pins a copy
    )
    for module in chunk.modules():
        if isinstance(module, router.TopKRouter):
            register(module)


def loss_type(name: str) -> str:
    """slime's option for a layout's objective."""
    return "value_loss" if "value" in name else "sft_loss" if "sft" in name else "policy_loss"


def own_queues(chunk: Any) -> None:
    """slime's, and its variable that turns them on."""
    from slime.utils import routing_replay

    os.environ["ENABLE_ROUTING_REPLAY"] = "1"
    replay_routes(
        chunk, routing_replay.get_routing_replay_compute_topk,
        routing_replay.register_routing_replay, routing_replay.RoutingReplay,
    )  # fmt: skip


def model_of(name: str, layout: Any, head: Any) -> tuple[Any, list[Any]]:
    """What a layout's model is like, and its chunks on this rank; a critic has `head`."""
    replay, critic = "replay" in name or "r3" in name, "value" in name
    is_sparse = "dsa" in name
    more = {} if replay else {"tie_embeddings": not critic}  # a head is not the embedding
    if "mtp" in name:
        more["mtp_num_layers"] = 2
    preset = "tiny-deepseek" if is_sparse else "tiny-moe" if replay else "tiny-qwen3"
    if is_sparse:  # every stage begins with a layer that chooses
        experts = {"moe_router_topk": 2} if replay else {"num_moe_experts": None}
        more = {"num_layers": 4, **experts}
    spec = resolve(preset, **{"num_layers": 2, **more}).with_vocab(VOCAB)
    recompute, overrides = "full" if "recompute" in name else "none", {"variable_seq_lengths": True}
    with changed(functools.partial(valued, head)) if critic else contextlib.nullcontext():
        chunks = build_model(spec, layout=layout, recompute=recompute, config_overrides=overrides)
    return spec, chunks


def further_losses() -> list[torch.Tensor]:
    """Megatron's log of multi-token prediction, which is empty then. Ranks have parts of it."""
    logged = [value.clone() for value in Log.tracker.values() if isinstance(value, torch.Tensor)]
    Log.tracker.clear()
    for value in logged:
        torch.distributed.all_reduce(
            value, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
    return logged


def steps(name: str) -> list[Step]:
    """A pass for log-probs and an update, on one rank."""
    with own_sparse.in_layout("slime", name):
        return _steps(name)


def on_cpu() -> None:
    """Tells slime where its tensors are; up to 0.3.1 it asks torch.cuda, which run_on_cpu does."""
    with contextlib.suppress(ImportError):
        from slime.utils import accelerator

        accelerator.device = accelerator.current_device = lambda: torch.device("cpu")


def _steps(name: str) -> list[Step]:
    from slime.backends.megatron_utils import model as slime_model
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_values
    from slime.backends.megatron_utils.model_provider import LinearForLastLayer
    from slime.utils.routing_replay import RoutingReplay

    runtime.initialize(layout := worker.layout_of(name))
    on_cpu()
    brings = "r3" in name
    spec, chunks = model_of(name, layout, LinearForLastLayer)
    ARGUMENTS.loss_type, ARGUMENTS.enable_mtp_training = loss_type(name), "mtp" in name
    both = Both(config_of(name), state=lambda: RoutingReplay.all_routing_replays)
    both.leaves_alike, both.left = "recompute" in name, further_losses
    both.slices = own_sparse.parts(name, ARGUMENTS)
    if spec.num_moe_experts:
        own_queues(chunks[0])
    # As slime's actor sets it.
    os.environ["ROUTING_REPLAY_STAGE"] = "replay_forward" if brings else "record"
    slime_model.get_forward_backward_func, slime_model.get_args = both, lambda: ARGUMENTS
    data = rollout_data(slice_log_prob_with_cp, turns="sft" in name)
    iterators, num = get_data_iterator(data), len(data["micro_batch_indices"])
    routes = fill_queues(chunks, iterators, data, spec) if brings else None
    with torch.no_grad():
        read = get_values if "value" in name else get_log_probs_and_entropy
        slime_model.forward_only(read, ARGUMENTS, chunks, iterators, [num])
    for iterator in iterators:
        iterator.reset()
    if brings:
        RoutingReplay.clear_all_forward()
    os.environ["ROUTING_REPLAY_STAGE"] = "replay_backward"
    slime_model.train_one_step(
        ARGUMENTS, 0, 0, iterators, chunks, build_optimizer(chunks),
        SimpleNamespace(step=lambda increment: None), num, GROUPS * SIZE,
    )  # fmt: skip
    if brings and not both.steps[-1].reason and layout.world_size == layout.pp:
        check_shared(both.steps[-1], routes)
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    worker.StandIns("wandb", "httpx", *UNUSED)
    worker.main([f"slime.backends.megatron_utils.{name}" for name in ("model", "actor")], steps)
