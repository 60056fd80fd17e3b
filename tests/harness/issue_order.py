"""The order in which a rank issues collectives, and whether ranks end if each of these blocks them.

It knows nothing of plans: what torch.distributed is asked for is written down, by process group.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import mappings

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single",
    "reduce_scatter", "reduce_scatter_tensor", "broadcast", "all_gather_object", "barrier",
)  # fmt: skip
BOUND = (
    (param_and_grad_buffer, "dist_reduce_scatter_func", "reduce_scatter_tensor"),
    (param_and_grad_buffer, "dist_all_gather_func", "all_gather_into_tensor"),
    (mappings, "dist_reduce_scatter_func", "reduce_scatter_tensor"),
    (mappings, "dist_all_gather_func", "all_gather_into_tensor"),
)
"""Where Megatron keeps a function under a name of its own."""


class Issued(NamedTuple):
    """A collective. group: the same on all of its ranks, with their numbers."""

    kind: str
    group: str
    ranks: tuple[int, ...]


@contextlib.contextmanager
def recorded(into: list[Issued]) -> Iterator[None]:
    """Writes down what this rank issues to groups of several ranks."""
    inside = [False]  # all_gather_object calls others

    def recording(kind: str, stock: Any) -> Any:
        parameters = inspect.signature(stock)

        def issue(*args: Any, **kwargs: Any) -> Any:
            group = parameters.bind(*args, **kwargs).arguments.get("group") or dist.group.WORLD
            if inside[0] or group.size() == 1:
                return stock(*args, **kwargs)
            ranks = tuple(dist.get_process_group_ranks(group))
            into.append(Issued(kind, group.group_name, ranks))
            inside[0] = True
            try:
                return stock(*args, **kwargs)
            finally:
                inside[0] = False

        return issue

    with pytest.MonkeyPatch.context() as patch:
        for kind in COLLECTIVES:
            stock = getattr(dist, kind)
            patch.setattr(dist, kind, recording(kind, stock))
        for module, name, kind in BOUND:
            if hasattr(module, name):
                patch.setattr(module, name, recording(kind, getattr(module, name)))
        yield


def why_not_ending(programs: Sequence[Sequence[Issued]]) -> str:
    """What ranks wait for if every collective blocks a rank until all others have come to it; empty
    if all of them end. That is so if, and only if, their orders can be merged into one."""
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for program, place in zip(programs, at, strict=True):
            if place == len(program):
                continue
            issued = program[place]
            next_ = [programs[one][at[one] :][:1] for one in issued.ranks]
            if all(one == [issued] for one in next_):
                for one in issued.ranks:
                    at[one] += 1
                moved = True
    waits = [
        f"rank {rank} at {place}: {program[place].kind} of {program[place].ranks}"
        for rank, (program, place) in enumerate(zip(programs, at, strict=True))
        if place < len(program)
    ]
    return f"deadlock: {'; '.join(waits)}" if waits else ""
