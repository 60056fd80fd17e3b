"""Which rank is on which host, so that an error can name the one that is gone.

Known under torchrun only: ranks that `launch` started share a host, and their launcher sees them.
The launcher has no torch: what needs it is imported when it is called.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_prefix.errors import UserError, listed

if TYPE_CHECKING:
    import torch.distributed as dist

LOST = re.compile(r"gloo|nccl|timed out|timeout|connection|broken pipe", re.IGNORECASE)
"""What communication says of another rank that does not answer."""


def meet(store: dist.Store, rank: int, world_size: int, limit: timedelta) -> None:
    """Tell the other ranks where this one is, and wait for them.

    Nodes start at different times, so `limit` may be longer than that of a message.

    Raises:
        UserError: some ranks have not come; it names them.
    """
    from torch.distributed import DistError

    from megatron_prefix.run import agreement

    keys = [f"host of rank {number}" for number in range(world_size)]
    store.set(keys[rank], socket.gethostname())
    try:
        store.wait(keys, limit)
    except DistError:
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        raise UserError(
            f"ranks {listed(missing, agreement.MOST_HOSTS)} of {world_size} have not joined in"
            f" {limit.total_seconds():.0f} s; their nodes' logs say why"
        ) from None
    agreement.hosts = tuple(store.get(key).decode() for key in keys)


def loss(rank: int, error: RuntimeError) -> str | None:
    """What `rank` says of an error in communication; None if it is another error."""
    from torch.distributed import DistError

    from megatron_prefix.run.agreement import MOST_HOSTS, hosts, named

    if not hosts or not (isinstance(error, DistError) or LOST.search(str(error))):
        return None
    return (
        f"{named(rank)} has lost a rank ({_elsewhere(hosts, hosts[rank], MOST_HOSTS)}): {error}."
        " That rank has failed or hangs, the network is down, or it needs longer than"
        " --message-timeout-minutes; its node's log says why"
    )


def _elsewhere(hosts: Sequence[str], host: str, most: int) -> str:
    """The ranks on other hosts, by host."""
    others = [number for number, other in enumerate(hosts) if other != host]
    by_host = [
        f"{', '.join(map(str, ranks))} on {name}"
        for name, ranks in itertools.groupby(others, key=hosts.__getitem__)
    ]
    if len(by_host) > most:
        by_host[most:] = [f"{len(by_host) - most} more hosts"]
    return f"other hosts have {'; '.join(by_host)}" if by_host else f"all are on {host}"
