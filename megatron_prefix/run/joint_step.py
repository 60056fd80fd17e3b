"""One forest for the rollouts of all data-parallel ranks: what they begin with runs once.

Ranks tell one another what their rollouts begin with, and each comes to the same common spans
(tree/across_ranks.py). That is only done in calls that all of them make, those with gradients, and
after they have agreed to go on with the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import Refusal, refused
from megatron_prefix.refusals.table import (
    ACROSS_EXPERTS,
    ACROSS_NO_GROUP,
    ACROSS_PLAN,
)
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.step import Step
from megatron_prefix.tree import Forest
from megatron_prefix.tree.across_ranks import beginnings_of, common_spans
from megatron_prefix.tree.build import trie
from megatron_prefix.tree.forest import TreeOptions


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
    if config.plan_file:
        return ACROSS_PLAN
    return None


def joint(step: Step, options: TreeOptions, group: Any, build: Callable[..., Forest]) -> Step:
    """A step with segments that cross data-parallel ranks; all of these call this.

    Args:
        step: this rank's, without segments.
        options: see TreeOptions; the same on all ranks.
        group: the data-parallel ranks.
        build: makes segments of samples, their microbatches, and what is `common`.
    """
    samples = step.samples or ()
    mine, numbers = beginnings_of(samples, step.microbatch_of, options)
    heard: list[Any] = [None] * group.size()
    dist.all_gather_object(heard, mine, group=group)
    common = common_spans(heard, group.rank(), trie, options)
    forest = build(samples, step.microbatch_of, common=(numbers, common))
    return replace(step, forest=forest.all_read() if step.reads_all else forest)
