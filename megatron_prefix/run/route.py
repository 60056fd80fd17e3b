"""Who runs a call, as far as that is known before its microbatches are read."""

from __future__ import annotations

import copy
from typing import NamedTuple

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.plan.gate import Decision
from megatron_prefix.run.backoff import unlooked
from megatron_prefix.run.first_step import FirstStep
from megatron_prefix.run.request import Request


class Watch(NamedTuple):
    """Megatron's schedule runs the step, and it is watched: the first of its kind.

    Attributes:
        first: watches it.
    """

    first: FirstStep


class Stock(NamedTuple):
    """Megatron's schedule runs the step, and nobody looks at it.

    Attributes:
        reason: what is in the way of its kind, or the decision not to look.
    """

    reason: UserError | Decision


class Share(NamedTuple):
    """Forward steps are suspended and read; segments answer them if that pays.

    Attributes:
        first: watches the step meanwhile; None if its kind is known.
    """

    first: FirstStep | None


def route(request: Request, config: PrefixConfig, *, looks_first: bool) -> Watch | Stock | Share:
    """The route of a call; the same on all ranks that make it together.

    Args:
        request: the call.
        config: what the user set.
        looks_first: see `PrefixSchedule`.
    """
    kind, first = request.kind, None
    if looks_first and not kind.watched:
        first = _first(request, config)
        if not first.suspended:
            return Watch(first)
    if kind.refusal is not None:
        return Stock(copy.copy(kind.refusal))
    if kind.backoff is not None and kind.backoff.skips():
        return Stock(unlooked())
    return Share(first)


def _first(request: Request, config: PrefixConfig) -> FirstStep:
    """What watches the first step of a kind.

    In mode "on" it is shared meanwhile, but for ranks that share experts or prompts: those would
    wait for ever for ranks that exchange in a loss.
    """
    rank = request.rank
    shares = config.mode == "on" and rank.experts is None and not rank.may_cross
    return FirstStep(
        request.arguments["forward_step_func"], rank, suspended=shares,
        masks_tell_loss=not request.callbacks.masks_tokens,
    )  # fmt: skip
