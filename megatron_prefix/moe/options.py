"""What a model's options say of its routers.  Pure."""

from __future__ import annotations

from typing import Any


def _balancing(config: Any) -> set[str]:
    """Names of the losses that balance the experts; "none" keeps its coefficient, and has none."""
    if not getattr(config, "num_moe_experts", None):
        return set()
    kinds = getattr(config, "moe_router_load_balancing_type", "none")
    coefficients: Any = getattr(config, "moe_aux_loss_coeff", 0.0)
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    pairs = zip(kinds, coefficients, strict=True)
    return {kind for kind, coeff in pairs if coeff > 0 and kind != "none"}


def has_global_loss(config: Any) -> bool:
    """Whether routers use global_aux_loss: counts of all data-parallel ranks, in order."""
    return "global_aux_loss" in _balancing(config)


def counts_tokens(config: Any) -> bool:
    """Whether routers do anything with which tokens are padding: losses, or a bias by load."""
    bias = getattr(config, "moe_router_enable_expert_bias", False)
    z_loss = getattr(config, "moe_z_loss_coeff", None)
    experts = bool(getattr(config, "num_moe_experts", None))
    return bool(_balancing(config)) or (experts and bool(bias or z_loss))
