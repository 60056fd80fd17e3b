"""Ranks that share experts meet in every expert layer, so their programs must have one shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_prefix.errors import UserError


def check(mine: Sequence[Any], group: Any) -> None:
    """Refuses a step in which ranks of an expert-parallel group would wait for ever.

    Every rank of the group calls this. Which tokens the ranks bring may differ; the kinds of their
    actions and the order may not.

    Args:
        mine: this rank's actions by kind, see `Plan.kinds`.
        group: the expert-parallel process group.

    Raises:
        UserError: the programs differ; on every rank of the group.
    """
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, list(mine), group=group)
    if any(other != found[0] for other in found):
        sizes = ", ".join(str(len(other)) for other in found)
        raise UserError(
            f"the ranks of an expert-parallel group have programs of {sizes} actions, not of one"
            " shape: give their data-parallel ranks trees of one shape, or use expert parallelism 1"
        )
