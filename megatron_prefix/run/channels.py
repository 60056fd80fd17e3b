"""Process groups for the messages of a pipeline, made once a job.

The operations of one process group may run one after the other, so no rank has more than one link,
to one neighbour in one direction, in any of them.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Channels:
    """The process groups of a pipeline's messages.

    Attributes:
        ranks: global ranks of the pipeline in order.
        rank: this rank's place among them.
        groups: by direction ("F": to the next rank, "B": to the previous) and the colour of the
            sender, see `colour`.
    """

    ranks: tuple[int, ...]
    rank: int
    groups: dict[tuple[str, int], Any]

    @property
    def size(self) -> int:
        """Pipeline size."""
        return len(self.ranks)


_made: weakref.WeakKeyDictionary[Any, Channels] = weakref.WeakKeyDictionary()


def colour(sender: int, size: int) -> int:
    """Colours the links of a ring of `size` ranks so that none touches another of its colour.

    With virtual stages the last rank sends to the first, so the links of one direction are a ring:
    two colours for an even one, a third for the closing link of an odd one.
    """
    return 2 if size % 2 and sender == size - 1 else sender % 2


def channels_of(group: Any, device: torch.device) -> Channels:
    """The channels of a pipeline group, made once, with its timeout.

    Every rank of the job calls this together, as making process groups demands.  Each channel is
    used once here, in one order on every rank: NCCL connects at first use, and two ranks must not
    wait for each other's first uses in different orders.
    """
    if group in _made:
        return _made[group]
    ranks, rank = tuple(dist.get_process_group_ranks(group)), group.rank()
    timeout = group._get_backend(device).options._timeout  # torch has no public name for it
    groups: dict[tuple[str, int], Any] = {}
    if len(ranks) > 1:
        pipelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pipelines, ranks)
        every = [list(pipeline) for pipeline in sorted(set(pipelines))]
        colours = sorted({colour(sender, len(ranks)) for sender in range(len(ranks))})
        for key in itertools.product("FB", colours):
            groups[key] = dist.new_subgroups_by_enumeration(every, timeout=timeout)[0]
    made = Channels(ranks, rank, groups)
    for kind, sender in itertools.product("FB" if groups else "", range(len(ranks))):
        _first_use(made, kind, sender, device)
    _made[group] = made
    return made


@contextlib.contextmanager
def closing_on_failure(group: Any) -> Iterator[None]:
    """Gives the channels up when a step fails: messages of that step may still be in them."""
    try:
        yield
    except BaseException:
        _made.pop(group, None)
        raise


def _first_use(channels: Channels, kind: str, sender: int, device: torch.device) -> None:
    receiver = (sender + (1 if kind == "F" else -1)) % channels.size
    group = channels.groups[kind, colour(sender, channels.size)]
    token = torch.zeros(1, device=device)
    if channels.rank == sender:
        dist.send(token, channels.ranks[receiver], group=group)
    elif channels.rank == receiver:
        dist.recv(token, channels.ranks[sender], group=group)
