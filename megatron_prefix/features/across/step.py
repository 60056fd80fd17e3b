"""One forest for the rollouts of all data-parallel ranks: what they begin with runs once.

Ranks ask one another which beginnings of their rollouts others have (ranges.py), tell all of them
where these end, and each comes to the same common spans (common.py). That is only done in calls
that all of them are known to make: those with gradients, and others where the trainer says so; and
after they have agreed to go on with the step.

With `across_ranks` "auto" they then decide together, and each of them shares alone where nothing is
in common, where the slowest would not be sooner, where one would need more memory than it may, or
where one of them fails to find out. What each finds out by itself is apart from what it asks the
others, so that a rank that fails can say so.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import Refusal, refused
from megatron_prefix.features import has_indexer_loss, replays_choices
from megatron_prefix.features.across.block_tree import RankBeginnings
from megatron_prefix.features.across.common import beginnings_of, common_spans
from megatron_prefix.features.across.common_spans import CommonSpans
from megatron_prefix.features.across.communicator import communicator, delivered
from megatron_prefix.features.across.ranges import NO_ANSWERS, NO_QUESTIONS, Inquiry, answered
from megatron_prefix.features.across.tries import find_below
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.refusals.table import (
    ACROSS_EXPERTS,
    ACROSS_GATHERS,
    ACROSS_INDEXER,
    ACROSS_NO_GROUP,
    ACROSS_PLAN,
    ACROSS_SCALES,
    ACROSS_UNREDUCED,
)
from megatron_prefix.run import agreement
from megatron_prefix.run.agreement import all_say, tried, worst
from megatron_prefix.run.planning import Planning
from megatron_prefix.run.rank import Rank, several
from megatron_prefix.run.read.step import Step
from megatron_prefix.run.request import AFTER, STEPS, Request
from megatron_prefix.sidecar.arena import wider
from megatron_prefix.tree import Forest
from megatron_prefix.tree.payload_map import Form

logger = logging.getLogger(__name__)

APART = "data-parallel ranks are not known to make equally many calls without gradients"
NOTHING = "rollouts on different ranks share no prefix that is long enough"
SLOWER = "it would not speed up the slowest one"
RESTS = f"no prompt was shared across ranks in {AFTER} steps; they check again after {STEPS}"
USUAL = (APART, NOTHING, SLOWER, RESTS)
"""Reasons that nobody has to look after."""


def why_alone(config: PrefixConfig, rank: Rank, *, together: bool) -> str | None:
    """Why no payload can cross data-parallel ranks in a call; the same on all of them.

    Args:
        config: what the user set.
        rank: this one.
        together: whether all data-parallel ranks are known to make the call.

    Returns:
        "" where nobody wants it, or there is one rank; None if some may cross.

    Raises:
        UserError: `across_ranks` is "on", and something is in the way.
    """
    if config.across == "off" or config.mode in ("off", "observe"):
        return ""
    if rank.siblings is not None and rank.siblings.size() == 1:
        return ""
    if not together:
        return APART
    obstacle = _in_the_way(config, rank)
    if obstacle is not None and config.across != "auto":
        raise refused(obstacle)
    return None if obstacle is None else f"{obstacle.name} is not supported yet"


def tell_alone(why: str, rank: Rank, told: set[str]) -> None:
    """Logs, once for every reason, why each data-parallel rank shares alone; "": they do not.

    Args:
        why: see `why_alone` and `Step.why_alone`; numbers are in brackets.
        rank: this one; one rank of the job logs.
        told: reasons that have been logged.
    """
    key = why.partition(" (")[0]
    if not why or key in told:
        return
    told.add(key)
    if rank.groups.tp.rank() == 0 and (rank.data_ranks is None or rank.data_ranks.rank() == 0):
        level = logging.INFO if key in USUAL else logging.WARNING
        logger.log(level, "not sharing across data-parallel ranks: %s", why)


def _in_the_way(config: PrefixConfig, rank: Rank) -> Refusal | None:
    if rank.data_ranks is None or rank.siblings is None:
        return ACROSS_NO_GROUP
    if rank.experts and rank.model.gathers_tokens:
        return ACROSS_EXPERTS
    ddp = (getattr(chunk, "ddp_config", None) for chunk in rank.models)
    if any(getattr(options, "overlap_param_gather", False) for options in ddp):
        return ACROSS_GATHERS  # forwards gather the weights that they are about to need
    if config.plan_file:
        return ACROSS_PLAN
    if rank.model.looks_ahead and rank.scales_auxiliary_losses:
        return ACROSS_SCALES
    has_loss = has_indexer_loss(rank.config) and not rank.forward_only
    if has_loss or replays_choices(rank.config):
        return ACROSS_INDEXER
    if not (rank.forward_only or rank.reduces):
        return ACROSS_UNREDUCED
    return None


def across(
    step: Step,
    request: Request,
    planning: Planning,
    build: Callable[..., Forest],
    build_alone: Callable[..., Forest],
) -> Step:
    """A step with its segments; all data-parallel ranks call this.

    Args:
        step: this rank's, without segments.
        request: the call, on a first stage.
        planning: knows the trees' options, and predicts.
        build: makes segments of samples, their microbatches, and what is `common`.
        build_alone: the same where nothing crosses; all ranks that share experts call it.

    Raises:
        Exception: what went wrong on this rank; the others wait to hear of it. Where it went wrong
            on another one, the step comes back as it is, or every rank is alone.
    """
    rank = request.rank
    group: Any = rank.siblings
    local, problem = tried(lambda: Across(step, request, planning, build))
    told, silent = _told(None if local is None else local.inquiry, rank)
    problem = problem or silent
    gathered = all_say(told, group)
    if local is not None and None not in gathered:
        _, problem = tried(lambda: local.build(gathered))
    if planning.config.across != "auto":
        if problem is not None:
            raise problem
        return (local and local.step) or step
    why = _decided(local, problem, rank)
    if why == "" and local is not None and local.step is not None:
        return local.step
    step = replace(step, why_alone=why)
    if local is not None and local.alone is not None and build_alone is build:
        return replace(step, forest=local.alone.forest)
    if planning.config.mode == "auto" and planning.shares_nothing(step.samples, rank):
        return replace(step, unshared=True)
    return step.with_forest(build_alone(step.samples or (), step.microbatch_of))


def _told(inquiry: Inquiry | None, rank: Rank) -> tuple[RankBeginnings | None, Exception | None]:
    """What the others hear of this rank's rollouts, or why it cannot say; all ranks call this.

    Args:
        inquiry: this rank's; None if it has failed: it asks nothing, but answers the others.
    """
    group: Any = rank.siblings
    questions = NO_QUESTIONS if inquiry is None else inquiry.questions
    questions = delivered(questions, group, rank.device)
    answers, problem = tried(lambda: answered(questions))
    answers = delivered(NO_ANSWERS if answers is None else answers, group, rank.device)
    if inquiry is None or problem is not None:
        return None, problem
    return tried(lambda: inquiry.shared(answers))


class Across:
    """A rank's step in which payloads cross, made in two parts.

    Args:
        step, request, planning, build: see `across`.

    Attributes:
        inquiry: what this rank asks the others of its rollouts.
        step: with its segments; None until the others have been heard.
        common: what the ranks have in common.
        alone: the step if nothing crosses; None until somebody asks.
    """

    def __init__(
        self, step: Step, request: Request, planning: Planning, build: Callable[..., Forest]
    ) -> None:
        self._request, self._build, self._before = request, build, step
        self._planning = planning
        self._options = planning.planner(request).options
        told, self._numbers = beginnings_of(step.samples or (), self._options)
        group: Any = request.rank.siblings
        self.inquiry = Inquiry(told, group.rank(), group.size())
        self.step: Step | None = None
        self.alone: Step | None = None
        self.common = CommonSpans()

    def build(self, heard: Sequence[Any]) -> None:
        """Makes the segments."""
        group: Any = self._request.rank.siblings
        self.common = common_spans(heard, group.rank(), self._options)
        find = functools.partial(find_below, beginnings=self._numbers, common=self.common)
        self.step = replace(self._built(find=find), crosses=True)

    def _built(self, **options: Any) -> Step:
        step = self._before
        built = self._build(step.samples or (), step.microbatch_of, **options)
        return step.with_forest(built)

    def pays(
        self, step: Step, met: JointForest, bytes_per_second: float
    ) -> tuple[float, float, float]:
        """By how many bytes this rank's predicted peak is above the limit of memory if payloads
        cross, the seconds that the step then takes, and those if the rank is alone; it asks no
        other rank.

        As if nothing hid: messages are added to what a rank computes, and so are reductions that
        would have overlapped with backwards.

        Args:
            step: this one, with its segments.
            met: the segments among those of ranks that share experts.
            bytes_per_second: of messages.
        """
        rank, self.alone = self._request.rank, self._built()
        across, local_only = (
            self._planning.forecast(one.forest, one.microbatch_of, self._request)
            for one in (step, self.alone)
        )
        _, over = self._planning.proposed(step, met, self._request)
        moved = _crossing(step.forest, rank)
        moved += rank.gradient_bytes * (rank.overlaps and not rank.forward_only)
        seconds = across.prefix_seconds + moved / bytes_per_second
        by_stock = local_only.stock_seconds if self._planning.config.mode == "auto" else math.inf
        return over, seconds, min(local_only.prefix_seconds, by_stock)


def _decided(
    across: Across | None,
    problem: BaseException | None,
    rank: Rank,
) -> str:
    """Why every rank shares alone, "" if payloads cross; the same on all that ask together.

    Args:
        across: this rank's step, if it could be made.
        problem: why it could not.
        rank: see `across`.
    """
    groups = several(rank.groups.tp, rank.data_ranks)
    _, failed = worst([], problem, groups, rank.device)
    if failed or across is None or across.step is None:
        return f"it could not be planned ({failed})"
    if not across.common.segments:
        return NOTHING
    rate = communicator(rank.siblings, rank.device).bytes_per_second
    step = across.step
    met = agreement.meet(step.forest, step.microbatch_of, rank.experts)
    local, problem = tried(lambda: across.pays(step, met, rate))
    (over, together, local_only), failed = worst(local or (0.0,) * 3, problem, groups, rank.device)
    if failed:
        across.alone = None  # some ranks have none, and all go on alike
        return f"it could not be predicted ({failed})"
    if over > 0:
        return f"a rank would take more memory than it may ({over / 2**30:.3g} GiB too much)"
    if together >= local_only:
        return f"{SLOWER} ({together:.4g} s with it, {local_only:.4g} s without)"
    logger.debug("predicted: %.4f s if prompts cross, %.4f s if not", together, local_only)
    return ""


def _crossing(forest: Forest, rank: Rank) -> float:
    """Bytes that a rank sends and receives in a step; states of recurrent layers do not count."""
    stages = rank.payloads
    rows = [one for of in stages[rank.stage :: rank.num_stages] for one in of]
    rows = [row for row in rows if row.form == Form.POSITIONS]
    back = not rank.forward_only
    a_position = sum(one.values + one.gradients * back for one in rows)
    dtype, states = rank.config.params_dtype, 0
    if rank.is_last:  # final hidden states, and their gradients
        states = rank.config.hidden_size * (dtype.itemsize + wider(dtype).itemsize * back)
    moved = sum(
        forest.segments[exchange.segment].spans[span].padded
        * (a_position + states * forest.segments[exchange.segment].scored)
        for exchange in forest.exchanges
        for _, spans in exchange.peers
        for span in spans
    )
    return moved / rank.groups.cp.size()
