"""Who runs a call, as far as that is known before its microbatches are read.

A call is made a `Request` if its model and its layout can be shared at all. All ranks have the same
options in every call, and so come to the same; but in the first call on a model they ask one
another, and an error of one of them is remembered by all.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, UserError, refused
from megatron_prefix.layers.precision import is_untried
from megatron_prefix.plan.gate import Decision
from megatron_prefix.refusals.own_errors import softened
from megatron_prefix.refusals.table import (
    FP8_UNTRIED,
    OWN_ERROR,
    SCALES_INTERLEAVED,
)
from megatron_prefix.run import parts_of_call
from megatron_prefix.run.agreement import agree, agree_on, tried
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.costs import Costs
from megatron_prefix.run.execute.messages import channels_of
from megatron_prefix.run.rank import Rank, meeting
from megatron_prefix.run.read.loss_variables import code_name
from megatron_prefix.run.request import Backoff, Request, StepKind, unlooked

LOSSES_EXCHANGE = "losses exchange with other data-parallel ranks"
"""Why prompts do not cross these."""


class Requests:
    """Makes the requests of one schedule, and remembers errors and kinds of earlier ones.

    Attributes:
        costs: by model and layout.
        kept: what parts of steps keep from call to call, by model and layout.
    """

    def __init__(self, config: PrefixConfig) -> None:
        self._config = config
        self.costs: dict[Hashable, Costs] = {}
        self.kept: defaultdict[Hashable, dict[str, dict[str, Any]]] = defaultdict(dict)
        self._errors: dict[Any, UserError | None] = {}
        self._have_all: dict[Any, bool] = {}  # whether all ranks have all parts that only speed up
        self._kinds: dict[Any, StepKind] = {}

    def of(self, arguments: Mapping[str, Any], callbacks: Callbacks) -> Request | UserError:
        """A call, or why it cannot be shared; all ranks that make it together come here.

        Raises:
            Exception: what went wrong on this rank and is no refusal, or that something did on
                another.
        """
        model, groups = arguments["model"], arguments["pg_collection"]
        models = model if isinstance(model, list) else [model]
        forward_only: bool = arguments["forward_only"]
        key = forward_only, *map(weakref.ref, models)
        if (error := self._errors.get(key)) is not None:
            return error
        request, problem = tried(lambda: self._suited(arguments, models, callbacks))
        reason = softened(problem, self._config.mode)
        if key not in self._errors:
            device = next(models[0].parameters()).device
            reason = agree(reason, meeting(groups, forward_only=forward_only), device)
            is_own = reason is not None and reason.refusal == OWN_ERROR
            self._errors[key] = reason if is_own else None
        if reason is not None and not isinstance(reason, CannotShare):
            raise reason
        if request is None or reason is not None:
            return reason  # type: ignore[return-value]
        rank, kind = request.rank, request.kind
        if optional := parts_of_call.optional(self._config, rank):
            if key not in self._have_all:  # in the first call that is not refused
                has_all = not parts_of_call.without_part(optional, request.parts)
                every = meeting(groups, forward_only=forward_only)
                _, self._have_all[key] = agree_on(None, has_all, every, rank.device)
            if not self._have_all[key]:
                request = replace(request, parts=parts_of_call.needed_of(request.parts))
        if self._config.mode != "observe" and rank.num_stages > 1:
            # By all ranks of the job, whichever schedule each of them takes.
            channels_of(rank.groups.pp, rank.device)
        if kind.ordered and kind.refusal is None:
            for part in request.parts:
                part.keep_local(LOSSES_EXCHANGE)
        return request

    def _suited(
        self, arguments: Mapping[str, Any], models: list[Any], callbacks: Callbacks
    ) -> Request:
        rank = Rank.of(
            models, arguments["pg_collection"], forward_only=arguments["forward_only"],
            sums_gradients=callbacks.sums_gradients,
        )  # fmt: skip
        if rank.model.other_steps is not None:
            raise rank.model.other_steps.error()
        if self._config.mode == "auto" and is_untried(rank.config):
            raise refused(FP8_UNTRIED)
        if rank.scales_auxiliary_losses and len(rank.models) > 1:
            raise refused(SCALES_INTERLEAVED)
        chosen = parts_of_call.chosen(self._config, rank, callbacks, self.kept[rank.layout])
        kind = self._kind(arguments["forward_step_func"], rank)
        if rank.layout not in self.costs:
            self.costs[rank.layout] = Costs(rank)
        return Request(arguments, rank, kind, callbacks, self.costs[rank.layout], chosen)

    def _kind(self, forward_step: Any, rank: Rank) -> StepKind:
        key = rank.forward_only, code_name(forward_step), *map(weakref.ref, rank.language_models)
        if key not in self._kinds:  # a reference to a model that has gone equals no other
            self._kinds[key] = StepKind(Backoff() if self._config.mode == "auto" else None)
        return self._kinds[key]


def route(kind: StepKind) -> UserError | Decision | None:
    """Why Megatron's schedule runs a call, and nobody looks at it; None if it may be shared. The
    same on all ranks that make it together."""
    if kind.refusal is not None:
        return copy.copy(kind.refusal)  # raised, it would hold frames
    if kind.backoff is not None and kind.backoff.skips():
        return unlooked()
    return None
