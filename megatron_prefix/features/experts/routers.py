"""Megatron's routers, and what differs in them between its releases."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_prefix.layers.releases import is_since, transformer_layers


def routers(model: Any) -> dict[int, Any]:
    """The mixture-of-experts routers of a language model, by layer of this model chunk."""
    mlps: list[Any] = [getattr(layer, "mlp", None) for layer in transformer_layers(model)]
    return {i: mlp.router for i, mlp in enumerate(mlps) if hasattr(mlp, "router")}


def forget_graphs(model: Any) -> None:
    """Lets experts keep no graph of the last segment.

    Their dispatchers keep the probabilities of the last call, and so their graph. Gradient hooks of
    DDP behind that hold the model, which then is never freed.
    """
    for layer in transformer_layers(model):
        mlp = getattr(layer, "mlp", None)
        dispatcher = getattr(mlp, "token_dispatcher", None)
        for part in (mlp, dispatcher, getattr(dispatcher, "_comm_manager", None)):
            for name, value in [*getattr(part, "__dict__", {}).items()] if dispatcher else ():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(part, name, value.detach())


@contextlib.contextmanager
def unscaled() -> Iterator[None]:
    """Auxiliary losses are multiplied by one inside, whatever Megatron's schedule has set."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler as Scaler

    before, Scaler.main_loss_backward_scale = Scaler.main_loss_backward_scale, None
    try:
        yield
    finally:
        Scaler.main_loss_backward_scale = before


def global_loss_is_whole(router: Any) -> dict[str, bool]:
    """The argument that stops a router's log from averaging over data-parallel ranks."""
    parameters = inspect.signature(router.attach_and_log_load_balancing_loss).parameters
    if "needs_dp_avg" in parameters:  # since 0.18
        return {"needs_dp_avg": False}
    return {"reduce_group_has_dp": True}


def sample_losses_weigh_batch() -> bool:
    """Whether, with calculate_per_token_loss, seq_aux_loss counts all samples of a microbatch.

    Before 0.19 Megatron weights it with the tokens of one sample
    (megatron/core/transformer/moe/router.py, `_apply_seq_aux_loss`).
    """
    return is_since("0.19")
