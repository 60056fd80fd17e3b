"""miles' forward_only and train_one_step, which it has from slime: names of layouts as there, and
"gdn": the first layer is its GatedDeltaNet of Qwen3.5."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import torch

from benchmarks.trainers import own_gdn, own_sparse, slime_steps
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.optimizer import build_optimizer
from tests.core.trainers import worker
from tests.core.trainers.both import Both, Step, config_of
from tests.core.trainers.cpu_training import run_on_cpu

ARGUMENTS = slime_steps.ARGUMENTS
vars(ARGUMENTS).update(
    qkv_format="thd", enable_witness=False, debug_disable_optimizer=False,
    use_dynamic_global_batch_size=False, true_on_policy_mode=False, skip_actor_forward_only=False,
    observe_training_entropy=False, save_local_weight_checksum=False,
)  # fmt: skip
"""What slime does not have."""


def replay_routes(chunk: Any) -> None:
    """Queues as miles' fork of Megatron makes them."""
    from miles.utils import replay_base

    manager = replay_base.routing_replay_manager
    manager.enabled = True
    slime_steps.replay_routes(
        chunk, functools.partial(manager.get_topk_fn, return_probs=True),
        lambda module: manager.register_to_module(module, "routing_replay"), replay_base.Replay,
    )  # fmt: skip


def fill_queues(chunks: list[Any], iterators: list[Any], data: dict[str, Any], spec: Any) -> Any:
    """miles' own way to give routers the routes of rollouts, and those."""
    from miles.backends.megatron_utils.replay_utils import register_replay_list_moe
    from miles.backends.training_utils.replay_data import fill_replay_data
    from miles.utils.replay_base import routing_replay_manager

    routes = slime_steps.drawn_routes(spec)
    data["rollout_routed_experts"] = [one.int() for one in routes]
    ARGUMENTS.sequence_parallel = unwrap(chunks[0]).config.sequence_parallel
    fill_replay_data(
        args=ARGUMENTS, models=chunks, data_iterator=iterators,
        num_microbatches=data["num_microbatches"], rollout_data=data,
        data_key=routing_replay_manager.data_key, replay_list=routing_replay_manager.replays,
        register_replay_list_func=register_replay_list_moe,
    )  # fmt: skip
    return routes


def states() -> list[Any]:
    """What holds routes: a stage for all routers, and their queues."""
    from miles.utils import replay_base

    return [*replay_base.all_replay_managers, *replay_base.routing_replay_manager.replays]


def prepare() -> None:
    """What miles' start does for the two functions, and its dumper off, as sglang's is missing."""
    from miles.backends.megatron_utils import model, parallel
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.utils import dumper_utils
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    dumper_utils._get_phase_override_configs = lambda *_: {}
    model.get_args = parallel.get_args = lambda: ARGUMENTS
    set_parallel_state(parallel.create_megatron_parallel_state(GroupInfo(0, 1, None)))


def model_of(name: str, layout: Any) -> tuple[Any, list[Any]]:
    """As slime's, perhaps with miles' own GatedDeltaNet."""
    from miles.backends.megatron_utils.model_provider import LinearForLastLayer

    has_gdn = "gdn" in name
    with own_gdn.in_miles(layout, "tiny-qwen3") if has_gdn else contextlib.nullcontext():
        spec, chunks = slime_steps.model_of(name, layout, LinearForLastLayer)
    if has_gdn and layout.cp > 1:
        own_gdn.pass_states(chunks)
    return spec, chunks


def steps(name: str) -> list[Step]:
    """A pass for log-probs and an update, on one rank."""
    with own_sparse.in_layout("miles", name):
        return _steps(name)


def _steps(name: str) -> list[Step]:
    from miles.backends.megatron_utils import model as miles_model
    from miles.backends.training_utils import cp_utils
    from miles.backends.training_utils.data import get_data_iterator
    from miles.backends.training_utils.loss import get_log_probs_and_entropy, get_values
    from miles.utils.replay_base import routing_replay_manager as manager

    layout = worker.layout_of(name)
    runtime.initialize(layout)
    prepare()
    spec, chunks = model_of(name, layout)
    ARGUMENTS.loss_type, ARGUMENTS.enable_mtp_training = slime_steps.loss_type(name), "mtp" in name
    miles_model.get_forward_backward_func = both = Both(config_of(name), state=states)
    both.leaves_alike, both.left = "recompute" in name, slime_steps.further_losses
    both.slices = own_sparse.parts(name, ARGUMENTS)
    data = slime_steps.rollout_data(cp_utils.slice_log_prob_with_cp, turns="sft" in name)
    data["num_microbatches"] = [len(data["micro_batch_indices"])]
    if spec.num_moe_experts:
        replay_routes(chunks[0])
    iterators, num = get_data_iterator(ARGUMENTS, chunks, data)
    routes = fill_queues(chunks, iterators, data, spec) if "r3" in name else None
    # As miles' actor sets it.
    manager.stage = "record" if routes is None else "replay_forward"
    with torch.no_grad():
        read = get_values if "value" in name else get_log_probs_and_entropy
        miles_model.forward_only(read, ARGUMENTS, chunks, iterators, num, 0)
    for iterator in iterators:
        iterator.reset()
    if routes is not None:
        manager.clear_all_forward()
    manager.stage = "replay_backward"
    miles_model.train_one_step(
        ARGUMENTS, 0, 0, iterators, chunks, build_optimizer(chunks),
        types.SimpleNamespace(step=lambda increment: None), num[0],
        slime_steps.GROUPS * slime_steps.SIZE, None, 0,
    )  # fmt: skip
    update = both.steps[-1]
    if routes is not None and not update.reason and layout.world_size == layout.pp:
        slime_steps.check_shared(update, routes)
    return both.steps


if __name__ == "__main__":
    run_on_cpu()
    own_gdn.put_kernels()
    worker.StandIns("wandb", "httpx", *slime_steps.UNUSED)
    worker.main(["miles.backends.megatron_utils.model"], steps)
