"""The first step of a kind, which Megatron's schedule runs and `FirstStep` watches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import refused
from megatron_prefix.megatron import features
from megatron_prefix.megatron.install import installed
from megatron_prefix.megatron.stock import run_stock
from megatron_prefix.refusals.own_errors import softened
from megatron_prefix.refusals.table import DATA_EXCHANGE, FORWARD_GRAPH
from megatron_prefix.run.agreement import agree, tried
from megatron_prefix.run.first_step import FirstStep
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.request import Request


def run_watched(first: FirstStep, request: Request, config: PrefixConfig) -> list[Any]:
    """Runs the step; what is in the way of its kind is remembered there, and the same on all ranks
    that later look at steps together."""
    rank, kind = request.rank, request.kind
    with first.watching():
        store = run_stock(
            request.arguments, forward_step_func=first.forward_step,
            data_iterator=first.iterator(request.arguments["data_iterator"]),
        )  # fmt: skip
    # A model that cannot run in segments is never captured: its dropout draws in stock's order.
    refusal: BaseException | None = softened(tried(lambda: _check(rank))[1], config.mode)
    refusal, exchange = refusal or first.error, None
    must_cross = rank.may_cross and config.across != "auto"
    if first.losses_exchange and (must_cross or rank.experts is not None):
        refusal = refusal or refused(DATA_EXCHANGE)  # ranks meet in segments, too
    elif first.losses_exchange:
        exchange = refused(DATA_EXCHANGE)
    if rank.forward_only and any(map(_has_graph, pytree.tree_leaves(store))):
        refusal = refusal or refused(FORWARD_GRAPH)
    kind.refusal = copy.copy(agree(refusal, rank.agreeing, rank.device))  # no traceback: models
    kind.ordered = agree(exchange, rank.agreeing, rank.device) is not None
    kind.watched = True
    return store


def _check(rank: Rank) -> None:
    """Raises CannotShare if the model cannot run in segments."""
    for inner, model in zip(rank.language_models, rank.models, strict=True):
        if installed(model) is None:
            features.check(inner, model)
    for part in rank.step_parts:
        for chunk in range(len(rank.models)):
            part.check_model(chunk)


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
