"""One call of a schedule, made a `Request` if its model and its layout can be shared at all.

All ranks have the same options in every call, and so come to the same; but in the first call on a
model they ask one another, and an error of one of them is remembered by all.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_prefix import parts
from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, UserError, refused
from megatron_prefix.features.across import step as across_step
from megatron_prefix.layers.precision import is_untried
from megatron_prefix.refusals.own_errors import softened
from megatron_prefix.refusals.table import (
    FP8_UNTRIED,
    HOST_LAYERS_CP,
    OWN_ERROR,
    SCALES_INTERLEAVED,
)
from megatron_prefix.run.agreement import agree, tried
from megatron_prefix.run.backoff import Backoff
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.execute.messages import channels_of
from megatron_prefix.run.rank import Rank, meeting
from megatron_prefix.run.read.loss_variables import code_name

LOSSES_EXCHANGE = "losses exchange with other data-parallel ranks"
"""Why prompts do not cross these."""


@dataclass(eq=False)
class StepKind:
    """What is known of calls of one kind: of one forward step, on the same models.

    Attributes:
        backoff: of looking at them; only in mode "auto".
        watched: whether the first of them has been watched, if that is wanted.
        told: whether the first of them that was shared has been told of.
        refusal: what was in its way; None: nothing.
        problem: what this rank has met while segments ran: the refusal, once all ranks have heard.
        ordered: whether losses have to be called in the trainer's order.
    """

    backoff: Backoff | None
    watched: bool = False
    told: bool = False
    refusal: UserError | None = None
    problem: UserError | None = None
    ordered: bool = False


@dataclass(frozen=True)
class Request:
    """One call of the schedule.

    Attributes:
        arguments: Megatron's, by name.
        rank: this one in the call.
        kind: what is known of calls like it.
        callbacks: what the trainer says of its microbatches.
    """

    arguments: Mapping[str, Any]
    rank: Rank
    kind: StepKind
    callbacks: Callbacks


class Requests:
    """Makes the requests of one schedule, and remembers errors and kinds of earlier ones.

    Args:
        config: what the user set.
        logged: lines that have been logged, once each.
        kept: what features keep from call to call, by layout of a model.

    Attributes:
        backoff: of data-parallel ranks that ask one another what crosses them.
    """

    def __init__(
        self,
        config: PrefixConfig,
        logged: set[str],
        kept: Mapping[Hashable, dict[str, dict[str, Any]]],
    ) -> None:
        self._config, self._logged, self._kept = config, logged, kept
        self.backoff = Backoff()
        self._errors: dict[Any, UserError | None] = {}
        self._kinds: dict[Any, StepKind] = {}

    def of(self, arguments: Mapping[str, Any], callbacks: Callbacks) -> Request | UserError:
        """A call, or why it cannot be shared; all ranks that make it together come here.

        Raises:
            Exception: what went wrong on this rank and is no refusal, or that something did on
                another.
        """
        rank = self._rank(arguments, callbacks)
        if not isinstance(rank, Rank):
            return rank
        kind = self._kind(arguments["forward_step_func"], rank)
        if kind.ordered and kind.refusal is None:
            rank.may_cross, rank.why_alone = False, LOSSES_EXCHANGE
            across_step.tell_alone(rank.why_alone, rank, self._logged)
        return Request(arguments, rank, kind, callbacks)

    def _rank(self, arguments: Mapping[str, Any], callbacks: Callbacks) -> Rank | UserError:
        model, groups = arguments["model"], arguments["pg_collection"]
        models = model if isinstance(model, list) else [model]
        forward_only: bool = arguments["forward_only"]
        key = forward_only, *map(weakref.ref, models)
        if (error := self._errors.get(key)) is not None:
            return error
        rank, problem = tried(
            lambda: self._suited(Rank(models, groups, forward_only=forward_only), callbacks)
        )
        reason = softened(problem, self._config.mode)
        if key not in self._errors:
            device = next(models[0].parameters()).device
            reason = agree(reason, meeting(groups, forward_only=forward_only), device)
            is_own = reason is not None and reason.refusal == OWN_ERROR
            self._errors[key] = reason if is_own else None
        if reason is not None and not isinstance(reason, CannotShare):
            raise reason
        if rank is None or reason is not None:
            return reason  # type: ignore[return-value]
        if self._config.mode != "observe" and rank.num_stages > 1:
            # By all ranks of the job, whichever schedule each of them takes.
            channels_of(rank.groups.pp, rank.device)
        return rank

    def _kind(self, forward_step: Any, rank: Rank) -> StepKind:
        key = rank.forward_only, code_name(forward_step), *map(weakref.ref, rank.language_models)
        if key not in self._kinds:  # a reference to a model that has gone equals no other
            self._kinds[key] = StepKind(Backoff() if self._config.mode == "auto" else None)
        return self._kinds[key]

    def _suited(self, rank: Rank, callbacks: Callbacks) -> Rank:
        """A rank in this call, if its model and its layout suit the configuration."""
        if rank.other_steps is not None:
            raise rank.other_steps.error()
        if self._config.mode == "auto" and is_untried(rank.config):
            raise refused(FP8_UNTRIED)
        if rank.scales_auxiliary_losses and len(rank.models) > 1:
            raise refused(SCALES_INTERLEAVED)
        if rank.siblings is None or rank.siblings.size() > 1:
            rank.reduces |= callbacks.sums_gradients
            together = callbacks.passes_together or not rank.forward_only
            alone = across_step.why_alone(self._config, rank, together=together)
            if alone is None and self._config.across == "auto" and self.backoff.skips():
                alone = across_step.RESTS
            rank.may_cross, rank.why_alone = alone is None, alone or ""
            across_step.tell_alone(rank.why_alone, rank, self._logged)
        if self._config.cache_host_layers and rank.groups.cp.size() > 1:
            raise refused(HOST_LAYERS_CP)
        rank.step_parts = parts.chosen(self._config, rank, callbacks, self._kept[rank.layout])
        return rank
