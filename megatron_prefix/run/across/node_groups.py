"""Data-parallel ranks that share a host, so that prompts may cross these alone (`across_ranks`
"node")."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_prefix.run.across import hosts
from megatron_prefix.run.across.agreement import all_say
from megatron_prefix.run.rank import Rank, several

_made: weakref.WeakKeyDictionary[Any, tuple[Any, bool]] = weakref.WeakKeyDictionary()


def node_group(rank: Rank) -> tuple[Any, bool]:
    """Those of a rank's `siblings` on its host, and whether there are several on any host; all
    ranks of a job call this together the first time.

    Ranks of one pipeline, tensor- or context-parallel group may be on several hosts. Two
    data-parallel ranks are together only if they are in each of these places, as all places of a
    data-parallel rank have the same prompts.
    """
    group: Any = rank.siblings
    if group in _made:
        return _made[group]
    names = all_say(hosts.here(), group)
    labels: Sequence[Hashable] = [names.index(name) for name in names]
    for other in several(rank.groups.tp, rank.groups.cp, rank.groups.pp):
        labels = [*zip(*all_say(labels, other), strict=True)]
    mine = labels[group.rank()]
    ranks = dist.get_process_group_ranks(group)
    near = [number for number, label in zip(ranks, labels, strict=True) if label == mine]
    timeout = group._get_backend(torch.device(rank.device)).options._timeout
    made = dist.new_group(near, timeout=timeout, use_local_synchronization=True)
    _made[group] = made, len({*labels}) < len(labels)
    return _made[group]
