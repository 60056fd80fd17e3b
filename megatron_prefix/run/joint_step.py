"""One forest for the rollouts of all data-parallel ranks: what they begin with runs once.

Ranks tell one another what their rollouts begin with, and each comes to the same common spans
(tree/across_ranks.py). That is only done in calls that all of them are known to make: those with
gradients, and others where the trainer says so; and after they have agreed to go on with the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import Refusal, refused
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.refusals.table import (
    ACROSS_AHEAD,
    ACROSS_EXPERTS,
    ACROSS_GATHERS,
    ACROSS_NO_GROUP,
    ACROSS_PLAN,
)
from megatron_prefix.run.communicator import communicator
from megatron_prefix.run.planning import Planning
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.step import Step
from megatron_prefix.sidecar.arena import wider
from megatron_prefix.tree import Forest
from megatron_prefix.tree.across_ranks import beginnings_of, common_spans
from megatron_prefix.tree.build import trie
from megatron_prefix.tree.payload_map import Form

logger = logging.getLogger(__name__)


def crosses(config: PrefixConfig, rank: Rank, *, together: bool) -> bool:
    """Whether payloads cross data-parallel ranks in a call; the same on all of them.

    Args:
        config: what the user set.
        rank: this one.
        together: whether all data-parallel ranks are known to make the call.

    Raises:
        UserError: `across_ranks` is "on", and something is in the way.
    """
    if config.across_ranks == "off" or not together or config.mode in ("off", "observe"):
        return False
    if rank.siblings is not None and rank.siblings.size() == 1:
        return False
    found = _in_the_way(config, rank)
    if found is not None and config.across_ranks == "on":
        raise refused(found)
    return found is None


def setting(config: PrefixConfig, rank: Rank) -> str:
    """What makes prompts run once in the job, or why that cannot be, for a message; "": they do."""
    if rank.crosses:
        return ""
    found = _in_the_way(config, rank)
    if found is not None:
        return f"{found.name} is not supported yet"
    return "set across_ranks to auto" + (", and mode, too" if config.mode == "observe" else "")


def _in_the_way(config: PrefixConfig, rank: Rank) -> Refusal | None:
    if rank.data_ranks is None or rank.siblings is None:
        return ACROSS_NO_GROUP
    if rank.has_global_loss or (rank.experts and rank.gathers_tokens):
        return ACROSS_EXPERTS
    if rank.looks_ahead:
        return ACROSS_AHEAD
    if rank.gathers_late:
        return ACROSS_GATHERS
    if config.plan_file:
        return ACROSS_PLAN
    return None


def joint(step: Step, rank: Rank, planning: Planning, build: Callable[..., Forest]) -> Step:
    """A step with segments that cross data-parallel ranks; all of these call this.

    With `across_ranks` "auto" nothing crosses if the slowest rank is predicted to be sooner then.

    Args:
        step: this rank's, without segments.
        rank: this one, on a first stage.
        planning: knows the trees' options, and times.
        build: makes segments of samples, their microbatches, and what is `common`.
    """
    samples = step.samples or ()
    group: Any = rank.siblings
    options = planning.planner(rank).options
    mine, numbers = beginnings_of(samples, step.microbatch_of, options)
    heard: list[Any] = [None] * group.size()
    dist.all_gather_object(heard, mine, group=group)
    common = common_spans(heard, group.rank(), trie, options)
    forest = build(samples, step.microbatch_of, common=(numbers, common))
    if planning.config.across_ranks == "auto":
        alone = build(samples, step.microbatch_of)
        if not _pays(forest, alone, rank, planning.meter(rank).times):
            forest = alone
    return replace(step, forest=forest.all_read() if step.reads_all else forest)


def _pays(across: Forest, alone: Forest, rank: Rank, times: CostModel) -> bool:
    """Whether the slowest rank is sooner if prompts cross; the same on all that ask together.

    As if nothing hid: messages are added to what a rank computes. A pass without gradients has a
    third of both, so the answer is that of a step.
    """
    bytes_per_second = communicator(rank.siblings, rank.device).bytes_per_second
    stages = rank.footprint(gathers=False, host_layers=0).payloads
    rows = [one for of in stages[rank.stage :: rank.num_stages] for one in of]
    rows = [one for one in rows if one.form == Form.POSITIONS]
    a_position = sum(one.values + one.gradients for one in rows)
    dtype, states = rank.config.params_dtype, 0
    if rank.is_last:  # final hidden states, and their gradients
        states = rank.config.hidden_size * (dtype.itemsize + wider(dtype).itemsize)
    crossing = sum(
        across.segments[one.segment].spans[span].padded
        * (a_position + states * across.segments[one.segment].scored)
        for one in across.exchanges
        for _, spans in one.peers
        for span in spans
    )
    communicating = crossing / rank.groups.cp.size() / bytes_per_second
    seconds = [_seconds(across, times) + communicating, _seconds(alone, times)]
    slowest = torch.tensor(seconds, dtype=torch.float64, device=rank.device)
    for group in (rank.groups.tp, rank.data_ranks):
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    with_messages, without = slowest.tolist()
    logger.debug("predicted: %.4f s if prompts cross, %.4f s if not", with_messages, without)
    return bool(with_messages < without)


def _seconds(forest: Forest, times: CostModel) -> float:
    """Of a rank's forwards and backwards; pipelines wait alike in both."""
    return sum(times.segment(one, kind) for one in forest.segments for kind in "FB")
