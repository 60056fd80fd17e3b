"""Megatron's log of routers' auxiliary losses.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def log_of_losses() -> dict[str, Any]:
    """Megatron's log of auxiliary losses, by name; of the layers and groups of one model."""
    try:  # since 0.18
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return get_moe_layer_wise_logging_tracker()
    return get_moe_metrics_tracker().metrics


def logged_losses() -> dict[str, Tensor]:
    """Logged auxiliary losses: by name one value per layer; the log's own tensors."""
    return {
        name: entry["values"] if isinstance(entry, dict) else entry.values
        for name, entry in log_of_losses().items()
    }
