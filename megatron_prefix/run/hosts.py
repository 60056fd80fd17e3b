"""Which rank is on which host, so that an error can name the one that is gone.

Known under torchrun only: ranks that `launch` started share a host, and their launcher sees them.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_prefix.errors import UserError, listed

if TYPE_CHECKING:
    import torch.distributed as dist

LOST = re.compile(r"gloo|nccl|timed out|timeout|connection|broken pipe", re.IGNORECASE)
"""What communication says of another rank that does not answer."""

MOST_HOSTS = 8
"""Hosts, or ranks, that a message lists."""

_hosts: tuple[str, ...] = ()  # by rank


def meet(store: dist.Store, rank: int, world_size: int, limit: timedelta) -> None:
    """Tell the other ranks where this one is, and wait for them.

    Nodes start at different times, so `limit` may be longer than that of a message.

    Raises:
        UserError: some ranks have not come; it names them.
    """
    from torch.distributed import DistError

    global _hosts
    keys = [f"host of rank {number}" for number in range(world_size)]
    store.set(keys[rank], here())
    try:
        store.wait(keys, limit)
    except DistError:
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        raise UserError(
            f"ranks {listed(missing, MOST_HOSTS)} of {world_size} have not joined in"
            f" {limit.total_seconds():.0f} s; their nodes' logs say why"
        ) from None
    _hosts = tuple(store.get(key).decode() for key in keys)


def here() -> str:
    """The host of this rank."""
    return socket.gethostname()


def named(rank: int) -> str:
    """`rank 3 on node-b`, or `rank 3` where hosts are not known."""
    return f"rank {rank} on {_hosts[rank]}" if _hosts else f"rank {rank}"


@contextlib.contextmanager
def naming(what: str, rank: int) -> Iterator[None]:
    """Says in an error of communication what this rank was doing, and whose log says why."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what}: {error}. A neighbour has failed, hangs, or needs longer than"
            f" --message-timeout-minutes; the log of {named(rank)} says why"
        ) from error


def told(rank: int, error: RuntimeError) -> str | None:
    """What `rank` says of an error in communication; None if it is another error."""
    from torch.distributed import DistError

    if not _hosts or not (isinstance(error, DistError) or LOST.search(str(error))):
        return None
    return (
        f"{named(rank)} has lost a rank ({_elsewhere(_hosts[rank])}): {error}. That rank has"
        " failed or hangs, the network is down, or it needs longer than --message-timeout-minutes;"
        " its node's log says why"
    )


def _elsewhere(host: str) -> str:
    """The ranks on other hosts, by host."""
    others = [number for number, its in enumerate(_hosts) if its != host]
    by_host = [
        f"{', '.join(map(str, ranks))} on {name}"
        for name, ranks in itertools.groupby(others, key=_hosts.__getitem__)
    ]
    if len(by_host) > MOST_HOSTS:
        by_host[MOST_HOSTS:] = [f"{len(by_host) - MOST_HOSTS} more hosts"]
    return f"other hosts have {'; '.join(by_host)}" if by_host else f"all are on {host}"
