"""Routers in a segment: they count every rollout that a token stands for.

That sum is a payload, too: a span of it goes to the ledger of the step (ledger.py), not to the
span's children.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from torch import Tensor

from megatron_prefix.features.experts.ledger import RouterLedger
from megatron_prefix.features.experts.part import routers_of
from megatron_prefix.layers.kind import Running
from megatron_prefix.layers.own_backward import with_backward


def in_segments(router: Any, layer: int, hooks: Running) -> dict[str, Callable[..., Any]]:
    # long: six short functions over the same three names
    """New methods of one router, by name. Outside of segments they behave as Megatron's.

    In a segment Megatron's own auxiliary losses are off, since they would take the segment for a
    microbatch. Instead `routing` counts in the segment's ledger and attaches its gradients.
    """
    routing, apply_z_loss = router.routing, router.apply_z_loss
    is_enabled, apply_bias = router.is_aux_loss_enabled, router._apply_expert_bias

    # verl's own `routing` counts tokens by itself.
    is_stock = getattr(routing, "__module__", "").startswith("megatron.core.")
    may_count = router.enable_expert_bias and not is_stock
    counted = [False]

    def running() -> tuple[RouterLedger, int] | None:
        context = hooks.current
        part = None if context is None else routers_of(context.parts)
        ledger = None if part is None else part.ledger_of.get(router)
        return None if ledger is None else (ledger, context.index)  # type: ignore[union-attr]

    def routing_of_segment(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        context, counted[0] = running(), False
        before = None
        if context is not None and may_count:
            before = router.local_tokens_per_expert.clone()
        with contextlib.ExitStack() as stack:
            segment = hooks.current
            part = None if segment is None else routers_of(segment.parts)
            if part is not None and (around := part.around.get(router)) is not None:
                num_tokens = logits.shape[:-1].numel()
                stack.enter_context(around(router, segment.index, num_tokens))  # type: ignore[union-attr]
            probs, routing_map = routing(logits, *args, **kwargs)
        if before is not None and not counted[0]:
            router.local_tokens_per_expert.copy_(before)
            bias_of_segment(routing_map)
        if context is not None and router.training:
            flat = logits.flatten(0, -2)
            probs = _accounted(router, flat, probs, is_enabled(), layer, *context)
        return probs, routing_map

    def z_loss_of_segment(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return apply_z_loss(logits, *args, **kwargs) if running() is None else logits

    def is_enabled_outside_segments() -> bool:
        return running() is None and is_enabled()

    def bias_of_segment(routing_map: Tensor, *args: Any, **kwargs: Any) -> None:
        context, counted[0] = running(), True
        if context is None:
            apply_bias(routing_map, *args, **kwargs)
        elif router.enable_expert_bias:
            routed = context[0].route(layer, context[1], routing_map)
            if torch.is_grad_enabled():  # not the first forward of activation recomputation
                router.local_tokens_per_expert += routed

    return {
        "routing": routing_of_segment,
        "apply_z_loss": z_loss_of_segment,
        "is_aux_loss_enabled": is_enabled_outside_segments,
        "_apply_expert_bias": bias_of_segment,
    }


def _accounted(
    router: Any,
    logits: Tensor,
    probs: Tensor,
    balanced: bool,
    layer: int,
    ledger: RouterLedger,
    index: int,
) -> Tensor:
    """The routing probabilities, with the auxiliary losses of a segment attached.

    Args:
        logits: [tokens, experts].
        probs: [tokens, experts].
        balanced: whether there is a load-balancing loss.
    """
    config = router.config
    experts = scores = squares = None
    if balanced:
        experts, scores = compute_routing_scores_for_aux_loss(
            logits, router.topk, router.score_function, fused=config.moe_router_fusion
        )
    if config.moe_z_loss_coeff is not None:
        squares = torch.logsumexp(logits, -1).square()
    if scores is None and squares is None:
        return probs
    # Without gradients this is the first forward of activation recomputation.
    ledger.count(layer, index, experts, scores, squares)
    if not torch.is_grad_enabled():
        return probs
    num_tokens, has_scores, has_squares = len(probs), scores is not None, squares is not None

    def pull(gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_scores, of_squares = ledger.gradients(layer, index, num_tokens)
        return gradient, of_scores if has_scores else None, of_squares if has_squares else None

    attached: Tensor = with_backward(
        lambda probs, *_: probs.view_as(probs), pull, probs, scores, squares
    )
    return attached
