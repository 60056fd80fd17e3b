"""verl's own engine steps: log-probs and the actor's update, packed, in dynamic batches.

"fused" in a layout's name: with `use_fused_kernels`, which replaces the model's `forward`;
"padded": without `use_remove_padding`, with a mask [rollouts, positions] at the model call;
"r2", "r3": experts, with routes that the pass for log-probs records, or that rollouts bring;
"recompute": with full activation recomputation; with "dp2" each rank has every other rollout;
"mtp": with multi-token prediction by its patch, which "detached" keeps from the decoder;
"value": its critic's engine, head and loss, instead of the actor's;
"plugin": with the schedule that verl's plugin has put into the engine's module.
"""

import contextlib
import re
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import torch
from megatron.core import parallel_state

from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.trainers.table import VERL
from tests.core.trainers import engine_routes, worker
from tests.core.trainers.both import Both, changed, config_of
from tests.oracle import attention

VOCAB, PROMPT, ANSWER, GROUPS, SIZE = 128, 40, 12, 3, 4
BRIDGE = {
    "": ("AutoBridge",), ".models": (), ".models.conversion": (),
    ".models.conversion.param_mapping": ("AutoMapping",),
}  # fmt: skip
"""What verl's module with its head imports of Megatron-Bridge, and what from there."""
ENGINE = "verl.workers.engine.megatron.transformer_impl"


def engine_of(name, chunks):
    """verl's engine around a model; its `__init__` would build one with mbridge."""
    from verl.workers.config import McoreEngineConfig
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.engine.megatron import transformer_impl as engines

    kind = engines.MegatronEngineWithLMHead
    if "value" in name:
        kind = engines.MegatronEngineWithValueHead
    engine, layout, replay = object.__new__(kind), worker.layout_of(name), ""
    if routes := re.search(r"\br[23]\b", name):
        replay = routes.group().upper()
    engine.engine_config = McoreEngineConfig(
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp, use_remove_padding="padded" not in name,
        use_dynamic_bsz=True, use_fused_kernels="fused" in name,
        router_replay=EngineRouterReplayConfig(mode=replay or "disabled"),
    )  # fmt: skip
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        mtp=SimpleNamespace(
            enable="mtp" in name, enable_train="mtp" in name, detach_encoder="detached" in name
        ),
        model_type="language_model", tokenizer=SimpleNamespace(pad_token_id=0),
    )  # fmt: skip
    engine.tf_config, engine.module = unwrap(chunks[0]).config, chunks
    if "mtp" in name:
        engines.patch_engine_mtp(chunks, engine.model_config)
    engine.enable_routing_replay, engine.mini_layer_topk_idx_list = bool(replay), []
    engine.is_mp_src_rank_with_outputs = lambda: True
    return engine


def fuse(chunk):
    """Lets verl replace the model's `forward`; what its kernels for a GPU compute, torch does."""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
    from verl.models.mcore import model_forward_fused
    from verl.utils.megatron import tensor_parallel

    def linear_cross_entropy(hidden, weight, labels, temperature, *_):
        hidden = copy_to_tensor_model_parallel_region(hidden.flatten(0, 1))
        logits = hidden @ weight.T / temperature
        entropy = tensor_parallel.vocab_parallel_entropy(logits)
        labels = labels.flatten()
        return tensor_parallel.vocab_parallel_log_probs_from_logits(logits.clone(), labels), entropy

    model_forward_fused.linear_cross_entropy = linear_cross_entropy
    model_forward_fused.patch_fused_forward(chunk)


def valued(model):
    """Gives the last stage verl's own head of a critic, and not Megatron-Bridge's newer one."""
    for module, names in BRIDGE.items():
        made = sys.modules[f"megatron.bridge{module}"] = ModuleType(module)
        made.__path__ = []
        vars(made).update({name: SimpleNamespace(register_module_type=print) for name in names})
    from verl.models.mcore import bridge

    bridge.make_value_model(model.config.hidden_size, model.config.sequence_parallel)(model)


def rows():
    """Tokens and attention mask, [rollouts, positions]: prompts on the right, answers on the left.

    The rollouts of a group have one prompt; they are in a random order.
    """
    draw = torch.Generator().manual_seed(3)

    def tokens(most):
        length = int(torch.randint(most // 2, most + 1, (1,), generator=draw))
        return torch.randint(1, VOCAB, (length,), generator=draw)

    ids, mask = torch.zeros(2, GROUPS * SIZE, PROMPT + ANSWER, dtype=torch.long)
    for group in range(GROUPS):
        prompt = tokens(PROMPT)
        for row in range(group * SIZE, (group + 1) * SIZE):
            answer = tokens(ANSWER)
            held = slice(PROMPT - len(prompt), PROMPT + len(answer))
            ids[row, held], mask[row, held] = torch.cat([prompt, answer]), 1
    order = torch.randperm(len(ids), generator=draw)
    return ids[order], mask[order]


def mine():
    """This data-parallel rank's rows: every other one of two."""
    rank = parallel_state.get_data_parallel_rank()
    ids, mask = (table[rank :: parallel_state.get_data_parallel_world_size()] for table in rows())
    return ids, mask


def batch(routes=None, *, replay=False):
    """What a step of verl's trainer gives the engine."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    ids, mask = mine()
    num = len(ids)
    columns = {
        "input_ids": ids, "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:],
        "response_mask": mask[:, PROMPT:], "old_log_probs": torch.full((num, ANSWER), -4.9),
        "advantages": torch.linspace(-1, 1, num)[:, None].expand(num, ANSWER).clone(),
        "returns": torch.linspace(-1, 1, num * ANSWER).view(num, ANSWER),
        "values": torch.full((num, ANSWER), 0.1), "temperature": torch.full((num,), 0.9),
    }  # fmt: skip
    data = TensorDict(columns, batch_size=[num])
    tensordict_utils.assign_non_tensor(
        data, use_dynamic_bsz=True, max_token_len_per_gpu=150, global_batch_size=GROUPS * SIZE,
        calculate_entropy=True, enable_routing_replay=replay,
    )  # fmt: skip
    data = left_right_2_no_padding(data)
    if routes is not None:
        data["routed_experts"] = routes
    return data


def rollouts(ids, mask):
    """Tokens of every rollout of some rows, and how many of them are its prompt."""
    tokens = [row[held.bool()] for row, held in zip(ids, mask, strict=True)]
    return tokens, mask[:, :PROMPT].sum(1).tolist()


def drawn_routes(spec):
    """Routes as the rollouts of this rank bring them."""
    found = engine_routes.drawn(*rollouts(*rows()), spec.num_layers, spec.num_moe_experts)
    rank = parallel_state.get_data_parallel_rank()
    return found[rank :: parallel_state.get_data_parallel_world_size()]


def check_shared(step, routes):
    """Whether an update shares what it can where routes agree."""
    alike = engine_routes.num_alike(rollouts(*mine())[0], routes)
    assert step.raw - step.executed >= 0.95 * alike, f"{step} shares less of {alike}"


def model_of(name, layout):
    """The model's numbers, and its chunk on this rank."""
    from verl.utils.megatron import router_replay_utils
    from verl.utils.megatron.router_replay_patch import apply_router_replay_patch

    router_replay_utils.device_name = "cpu"
    overrides = {"variable_seq_lengths": True}
    experts = re.search(r"\br[23]\b", name)
    if experts:
        apply_router_replay_patch()
        overrides["moe_enable_routing_replay"] = True
    preset, tied = "tiny-moe" if experts else "tiny-qwen3", {}
    if "value" in name and layout.pp > 1:
        tied = {"tie_embeddings": False}  # Megatron would add up gradients of head and embedding
    further = {"mtp_num_layers": 2} if "mtp" in name else {}
    spec = resolve(preset, num_layers=2, **tied, **further).with_vocab(VOCAB)
    recompute = "full" if "recompute" in name else "none"
    with changed(valued) if "value" in name else contextlib.nullcontext():
        chunks = build_model(spec, layout=layout, recompute=recompute, config_overrides=overrides)
    if "padded" in name:
        attention.put_into(chunks[0], ignores_masks=True)
    if "fused" in name:
        fuse(chunks[0])
    return spec, chunks


def loss_of(name):
    """The update's loss: the actor's or the critic's."""
    from verl.workers.config import ActorConfig, CriticConfig
    from verl.workers.utils import losses

    sizes = {
        "strategy": "megatron", "rollout_n": SIZE, "ppo_mini_batch_size": GROUPS * SIZE,
        "ppo_micro_batch_size_per_gpu": 1, "loss_agg_mode": "token-mean",
    }  # fmt: skip
    if "value" in name:
        return partial(losses.value_loss, config=CriticConfig(**sizes))
    return partial(losses.ppo_loss, config=ActorConfig(**sizes, entropy_coeff=0.01))


def steps(name):
    """A pass for log-probs and an update, on one rank."""
    from verl.utils.megatron.router_replay_patch import RouterReplay
    from verl.workers.engine.megatron import transformer_impl

    layout = worker.layout_of(name)
    runtime.initialize(layout)
    spec, chunks = model_of(name, layout)
    engine, both = engine_of(name, chunks), Both(config_of(name))
    both.state = lambda: [engine, *RouterReplay.router_instances]
    both.leaves_alike, both.masks_tokens = "recompute" in name, VERL.masks_tokens
    if "plugin" in name:
        both.swapped = transformer_impl.get_forward_backward_func
        assert isinstance(both.swapped(), PrefixSchedule), "verl has not loaded the plugin"
    transformer_impl.get_forward_backward_func = both
    replay, routes = engine.enable_routing_replay, None
    if "r3" in name:
        small = [one.to(torch.int16) for one in drawn_routes(spec)]
        routes = torch.nested.as_nested_tensor(small, layout=torch.jagged)
    with torch.no_grad():
        found = engine.forward_backward_batch(batch(routes, replay=replay), None, forward_only=True)
    if "r2" in name:  # the last stage has them; verl's driver gives them to all workers
        recorded = [found["model_output"]["routed_experts"] if found else None]
        torch.distributed.broadcast_object_list(recorded, layout.world_size - 1)
        routes = recorded[0]
    chunks[0].zero_grad_buffer()
    engine.forward_backward_batch(batch(routes, replay=replay), loss_of(name), forward_only=False)
    update = both.steps[-1]
    if routes is not None and not update.reason and layout.world_size == layout.pp:
        check_shared(update, routes.unbind())
    return both.steps


if __name__ == "__main__":
    # The last is what torch imports where verl compiles a function, in every rank anew.
    used = ("verl.workers.utils.losses", "verl.workers.utils.padding", "torch._inductor.compile_fx")
    worker.main([ENGINE, *used], steps)
