"""The first step of each kind, run by Megatron's schedule, or shared while it is watched."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any

import torch
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import refused
from megatron_prefix.features.watch.first_step import FirstStep
from megatron_prefix.megatron import features
from megatron_prefix.megatron.install import installed
from megatron_prefix.megatron.stock import run_stock
from megatron_prefix.parts import Around, Run, StepPart
from megatron_prefix.plan.gate import Decision
from megatron_prefix.refusals.own_errors import softened
from megatron_prefix.refusals.table import DATA_EXCHANGE, FORWARD_GRAPH
from megatron_prefix.run.agreement import agree, tried
from megatron_prefix.run.read.suspend import Capture
from megatron_prefix.run.request import Request

WATCHED = "the first step of its kind is watched"
"""Why the stock schedule runs a step that nothing is in the way of."""


class Watch(Around):
    """Watches the first step of each kind; what is in the way of the kind is remembered there."""

    def shared(self, run: Run, request: Request) -> list[Any]:
        """Runs a step. In mode "on" the first of a kind is shared while it is watched, but for
        ranks that share experts or prompts: those would wait for ever for ranks that exchange in a
        loss.

        Raises:
            CannotShare: what was shared meanwhile may be wrong.
        """
        if request.kind.watched:
            return run(request)
        meets = request.rank.experts is not None or request.may_cross
        if self.config.mode == "on" and not meets:
            return self._shared_meanwhile(run, request)
        return self._stock(run, request)

    def _shared_meanwhile(self, run: Run, request: Request) -> list[Any]:
        first, kind = FirstStep(request, suspended=True), request.kind
        part = _Watched(first, request, self.config)
        store = run(replace(request, forward_step=first.forward_step, parts=(part, *request.parts)))
        kind.watched, kind.refusal = True, copy.copy(first.error)
        first.check()  # else what was computed may be wrong
        return store

    def _stock(self, run: Run, request: Request) -> list[Any]:
        store = run(replace(request, stock=lambda: self._run_stock(request)))
        if (refusal := request.kind.refusal) is not None:
            self.reports.refused(refusal)
        else:
            self.reports.stock(Decision(False, WATCHED, False, 1.0))
        return store

    def _run_stock(self, request: Request) -> list[Any]:
        """Ranks that later look at steps together remember the same of their kind."""
        rank, kind, config = request.rank, request.kind, self.config
        first = FirstStep(request, suspended=False)
        with first.watching():
            store = run_stock(request.arguments, forward_step_func=first.forward_step)
        # A model that cannot run in segments is never captured: its dropout draws in stock's order.
        refusal: BaseException | None = softened(
            tried(lambda: _check_model(request))[1], config.mode
        )
        refusal, exchange = refusal or first.error, None
        must_cross = request.may_cross and config.across != "auto"
        if first.losses_exchange and (must_cross or rank.experts is not None):
            refusal = refusal or refused(DATA_EXCHANGE)  # ranks meet in segments, too
        elif first.losses_exchange:
            exchange = refused(DATA_EXCHANGE)
        tensors = (leaf for leaf in pytree.tree_leaves(store) if isinstance(leaf, torch.Tensor))
        if rank.forward_only and any(tensor.requires_grad for tensor in tensors):
            refusal = refusal or refused(FORWARD_GRAPH)
        groups = request.agreeing
        kind.refusal = copy.copy(agree(refusal, groups, rank.device))  # no traceback: models
        kind.ordered = agree(exchange, groups, rank.device) is not None
        kind.watched = True
        return store


class _Watched(StepPart):
    def __init__(self, first: FirstStep, request: Request, config: PrefixConfig) -> None:
        super().__init__(config, request.rank, request.callbacks)
        self._first = first

    def around_forward_steps(self, capture: Capture) -> contextlib.AbstractContextManager:
        return self._first.watching()

    def read(self, capture: Capture) -> None:
        self._first.check()


def _check_model(request: Request) -> None:
    rank = request.rank
    for inner, model in zip(rank.language_models, rank.models, strict=True):
        if installed(model) is None:
            features.check(inner, model)
    for part in request.parts:
        for chunk in range(len(rank.models)):
            part.check_model(chunk)
