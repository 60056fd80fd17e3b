"""Which Megatron versions and features the schedule runs, and what it refuses by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import megatron.core
from packaging.version import Version

from megatron_prefix.errors import UserError

logger = logging.getLogger(__name__)
OLDEST = Version("0.16.1")
NEWEST_READ = Version("0.19.2")


def _on(name: str) -> Callable[[Any], bool]:
    return lambda config: bool(getattr(config, name, None))


def _above(name: str, limit: float) -> Callable[[Any], bool]:
    return lambda config: (getattr(config, name, None) or 0) > limit


def _other_than(name: str, usual: str) -> Callable[[Any], bool]:
    return lambda config: getattr(config, name, usual) not in (usual, None)


# (Megatron's option, when it is in the way, what to do)
REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("hidden_dropout", _above("hidden_dropout", 0), "set it to 0: copies of a prompt would drop differently"),
    ("attention_dropout", _above("attention_dropout", 0), "set it to 0: copies of a prompt would drop differently"),
    ("fp8", _on("fp8"), "train in bf16: scaling factors depend on what shares a tensor"),
    ("fp4", _on("fp4"), "train in bf16: scaling factors depend on what shares a tensor"),
    ("mtp_num_layers", _on("mtp_num_layers"), "turn multi-token prediction off: its last prompt inputs are response tokens"),
    ("multi_latent_attention", _on("multi_latent_attention"), "use the stock schedule: rotary positions are set inside MLA layers"),
    ("window_size", _on("window_size"), "use the stock schedule: a sliding window is not a dense block"),
    ("softmax_type", _other_than("softmax_type", "vanilla"), "use the stock schedule: sinks are not wired up yet"),
    ("context_parallel_size", _above("context_parallel_size", 1), "use --cp 1: context parallelism is not supported yet"),
    ("num_moe_experts", _on("num_moe_experts"), "use the stock schedule: router accounting is not supported yet"),
    ("overlap_moe_expert_parallel_comm", _on("overlap_moe_expert_parallel_comm"), "turn it off: it needs Megatron's own schedule plan"),
    ("delay_wgrad_compute", _on("delay_wgrad_compute"), "turn it off: it needs Megatron's own schedule plan"),
    ("hybrid_context_parallel", _on("hybrid_context_parallel"), "turn it off: it brings its own loop"),
    ("fine_grained_activation_offloading", _on("fine_grained_activation_offloading"), "turn it off: it asserts the stock order of backward passes"),
    ("cpu_offloading", _on("cpu_offloading"), "turn it off: it assumes the stock order of backward passes"),
    ("enable_cuda_graph", _on("enable_cuda_graph"), "turn it off: segments differ in length"),
    ("cuda_graph_impl", _other_than("cuda_graph_impl", "none"), "set it to 'none': segments differ in length"),
    ("flash_decode", _on("flash_decode"), "turn it off: it goes around core attention"),
    ("fused_single_qkv_rope", _on("fused_single_qkv_rope"), "turn it off: it applies one rotary table to a whole row"),
    ("multimodal rope", lambda config: getattr(config, "position_embedding_type", "") == "mrope", "use the stock schedule"),
)  # fmt: skip


def check_version(version: str | None = None) -> None:
    """Refuses a Megatron-Core that the hooks do not fit; warns of one that nobody has read yet.

    Raises:
        UserError: older than 0.16.1.
    """
    found = Version(version or megatron.core.__version__)
    if Version(found.base_version) < OLDEST:
        raise UserError(f"megatron-core {found} is too old: install {OLDEST} or newer")
    if found > NEWEST_READ:
        logger.warning("megatron-core %s is newer than %s, the newest tried", found, NEWEST_READ)


def refusals(config: Any) -> list[str]:
    """One line for every option of a TransformerConfig that the schedule cannot run with."""
    return [f"{name}: {mend}" for name, is_on, mend in REFUSED if is_on(config)]


def check(model: Any) -> None:
    """Refuses a model that the schedule cannot run exactly.

    Raises:
        UserError: names the first feature in the way and the mend.
    """
    check_version()
    found = refusals(model.config)
    if getattr(model, "position_embedding_type", "rope") == "mrope":
        found.append("mrope: use the stock schedule: positions have three components")
    for number, layer in enumerate(model.decoder.layers):
        attention = getattr(layer, "self_attention", None)
        if not hasattr(attention, "core_attention"):
            found.append(f"layer {number} has no core attention: use the stock schedule")
    if found:
        raise UserError(f"the prefix schedule cannot run this model with {found[0]}")
