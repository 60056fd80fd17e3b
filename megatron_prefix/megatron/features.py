"""Which Megatron versions and features the schedule runs, and what it refuses by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import megatron.core
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from packaging.version import Version

from megatron_prefix.errors import UserError
from megatron_prefix.megatron import mixers, modules
from megatron_prefix.moe.versions import routers

logger = logging.getLogger(__name__)
OWN_PLAN = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
"""Options with which Megatron's schedule asks forward steps for a plan of its own."""
OLDEST = Version("0.16.1")
NEWEST_TRIED = Version("0.19.2")


def _on(name: str) -> Callable[[Any], bool]:
    return lambda config: bool(getattr(config, name, None))


def _above(name: str, limit: float) -> Callable[[Any], bool]:
    return lambda config: (getattr(config, name, None) or 0) > limit


def _with_experts(name: str, is_off: tuple[Any, ...] = (None, False)) -> Callable[[Any], bool]:
    def is_on(config: Any) -> bool:
        return (
            bool(getattr(config, "num_moe_experts", None))
            and getattr(config, name, None) not in is_off
        )

    return is_on


def _balances(*kinds: str, others: bool = False) -> Callable[[Any], bool]:
    """Whether one of these load-balancing types is used; with `others`, any type but these."""

    def is_on(config: Any) -> bool:
        given = getattr(config, "moe_router_load_balancing_type", "none")
        given = [given] if isinstance(given, str) else given
        experts = getattr(config, "num_moe_experts", None)
        return bool(experts) and any((kind in kinds) != others for kind in given)

    return is_on


def _other_than(name: str, usual: str) -> Callable[[Any], bool]:
    return lambda config: getattr(config, name, usual) not in (usual, None)


# For routers whose choice for a token depends on other tokens or on chance.
_COUPLED = "leave it out: copies of a prompt token would {}"
_BALANCE = "use aux_loss, seq_aux_loss or global_aux_loss: {}"
_KNOWN_BALANCING = (
    "none",
    "aux_loss",
    "seq_aux_loss",
    "global_aux_loss",
    "sinkhorn",
    "quantile_balancing",
)

# (Megatron's option, when it is in the way, what to do)
REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("hidden_dropout", _above("hidden_dropout", 0), "set it to 0: copies of a prompt would drop differently"),
    ("attention_dropout", _above("attention_dropout", 0), "set it to 0: copies of a prompt would drop differently"),
    ("fp8", _on("fp8"), "train in bf16: scaling factors depend on what shares a tensor"),
    ("fp4", _on("fp4"), "train in bf16: scaling factors depend on what shares a tensor"),
    ("quant_recipe", _on("quant_recipe"), "leave it out: scaling factors depend on what shares a tensor"),
    ("mtp_num_layers", _on("mtp_num_layers"), "turn multi-token prediction off: its last prompt inputs are response tokens"),
    ("multi_latent_attention", _on("multi_latent_attention"), "use the stock schedule: rotary positions are set inside MLA layers"),
    ("window_size", _on("window_size"), "use the stock schedule: a sliding window is not a dense block"),
    ("softmax_type", _other_than("softmax_type", "vanilla"), "use the stock schedule: sinks are not wired up yet"),
    ("qk_clip", _on("qk_clip"), "use the stock schedule: it reads the largest score of every attention call"),
    ("log_max_attention_logit", _on("log_max_attention_logit"), "turn it off: it reads the largest score of every attention call"),
    ("overlap_moe_expert_parallel_comm", _on("overlap_moe_expert_parallel_comm"), "turn it off: it needs Megatron's own schedule plan"),
    ("delay_wgrad_compute", _on("delay_wgrad_compute"), "turn it off: it needs Megatron's own schedule plan"),
    ("hybrid_context_parallel", _on("hybrid_context_parallel"), "turn it off: it brings its own loop"),
    ("fine_grained_activation_offloading", _on("fine_grained_activation_offloading"), "turn it off: it asserts the stock order of backward passes"),
    ("cpu_offloading", _on("cpu_offloading"), "turn it off: it assumes the stock order of backward passes"),
    ("enable_cuda_graph", _on("enable_cuda_graph"), "turn it off: segments differ in length"),
    ("cuda_graph_impl", _other_than("cuda_graph_impl", "none"), "set it to 'none': segments differ in length"),
    ("flash_decode", _on("flash_decode"), "turn it off: it goes around core attention"),
    ("fused_single_qkv_rope", _on("fused_single_qkv_rope"), "turn it off: it applies one rotary table to a whole row"),
    ("moe_expert_capacity_factor", _with_experts("moe_expert_capacity_factor"), _COUPLED.format("have room or not")),
    ("moe_expert_rank_capacity_factor", _with_experts("moe_expert_rank_capacity_factor"), _COUPLED.format("have room or not")),
    ("moe_pad_expert_input_to_capacity", _with_experts("moe_pad_expert_input_to_capacity"), _COUPLED.format("have room or not")),
    ("moe_token_dropping", _with_experts("moe_token_dropping"), _COUPLED.format("be dropped or not")),
    ("moe_input_jitter_eps", _with_experts("moe_input_jitter_eps"), _COUPLED.format("draw different noise")),
    ("moe_router_force_load_balancing", _with_experts("moe_router_force_load_balancing"), _COUPLED.format("draw different experts")),
    ("moe_router_force_biased", _with_experts("moe_router_force_biased"), _COUPLED.format("draw different experts")),
    ("moe_router_load_balancing_type sinkhorn", _balances("sinkhorn"), _BALANCE.format("every token's experts depend on the others")),
    ("moe_router_load_balancing_type quantile_balancing", _balances("quantile_balancing"), _BALANCE.format("every token's experts depend on the others")),
    ("moe_router_load_balancing_type of another name", _balances(*_KNOWN_BALANCING, others=True), _BALANCE.format("it is not known here")),
    ("moe_paged_stash", _with_experts("moe_paged_stash"), "turn it off: it assumes the stock order of backward passes"),
    ("multimodal rope", lambda config: getattr(config, "position_embedding_type", "") == "mrope", "use the stock schedule"),
)  # fmt: skip


def check_version(version: str | None = None) -> None:
    """Refuses a Megatron-Core that is too old; warns of one that was not tried.

    Raises:
        UserError: older than 0.16.1.
    """
    found = Version(version or megatron.core.__version__)
    if Version(found.base_version) < OLDEST:
        raise UserError(f"megatron-core {found} is too old: install {OLDEST} or newer")
    if found > NEWEST_TRIED:
        logger.warning("megatron-core %s is newer than %s, the newest tried", found, NEWEST_TRIED)


def refusals(config: Any) -> list[str]:
    """One line for every option of a TransformerConfig that the schedule cannot run with."""
    return [f"{name}: {fix}" for name, is_on, fix in REFUSED if is_on(config)]


def _configs(model: Any) -> Iterator[Any]:
    """The model's TransformerConfig, and those that its modules have of their own."""
    yield model.config
    seen = {id(model.config)}
    for module in model.decoder.modules():
        config = getattr(module, "config", None)
        if isinstance(config, TransformerConfig) and id(config) not in seen:
            seen.add(id(config))
            yield config


def _wrapper_refusals(model: Any) -> list[str]:
    """One line for every wrapper of a model chunk that the schedule cannot run with."""
    found = []
    while hasattr(model, "module"):
        ddp = getattr(model, "ddp_config", None)
        kind = type(model).__name__
        if "FullySharded" in kind or "FSDP" in kind or getattr(ddp, "use_megatron_fsdp", False):
            found.append(f"{kind}: use DistributedDataParallel: FSDP reduces at every backward")
        if getattr(ddp, "delay_wgrad_compute", False):
            found.append(
                "delay_wgrad_compute of DDP: turn it off: it needs Megatron's own schedule plan"
            )
        model = model.module
    return found


def offload_refusal(model: Any) -> str | None:
    """Why a model chunk cannot run with memory policy "offload"; None where it can.

    Fused weight gradients set a flag on the weight, which Megatron's overlapped reduction reads; but a
    weight that comes back through autograd's saved-tensor hooks is another object.
    """
    ddp = getattr(model, "ddp_config", None)
    fused = getattr(get_model_config(model), "gradient_accumulation_fusion", False)
    if not (fused and ddp is not None and ddp.overlap_grad_reduce):
        return None
    return (
        "memory policy offload with gradient_accumulation_fusion and overlap_grad_reduce: turn"
        " overlap_grad_reduce off, or use recompute"
    )


def check(model: Any, wrapped: Any = None) -> None:
    """Refuses a model that the schedule cannot run exactly.

    Args:
        model: the language model.
        wrapped: the same in its wrappers, if it has any.

    Raises:
        UserError: names the first feature in the way and the fix.
    """
    check_version()
    found = [line for config in _configs(model) for line in refusals(config)]
    found += _wrapper_refusals(wrapped)
    if getattr(model, "position_embedding_type", "rope") == "mrope":
        found.append("mrope: use the stock schedule: positions have three components")
    found += [*mixers.refusals(model), *modules.refusals(model)]
    for number, router in routers(model).items():
        if not isinstance(router, TopKRouter):
            kind = type(router).__name__
            found.append(f"layer {number}'s router {kind}: use Megatron's TopKRouter")
    _refuse(found)


def check_options(config: Any, found: Iterable[mixers.Mixer]) -> None:
    """Refuses options that may have changed since `check`.

    Args:
        config: the language model's TransformerConfig.
        found: what its layers mix positions with.

    Raises:
        UserError: as of `check`.
    """
    _refuse([*refusals(config), *mixers.option_refusals(found, config)])


def _refuse(found: list[str]) -> None:
    if found:
        raise UserError(f"the prefix schedule cannot run this model with {found[0]}")
