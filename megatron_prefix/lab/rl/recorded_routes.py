"""Records the experts that a model's routers choose for rollouts, by a pass without gradients.

Megatron's own schedule runs the pass, since RouterReplay records a microbatch at a time. Every rank
sees some layers, some positions and some rollouts; all of them get all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megatron_prefix.features.experts.routers import routers
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.rl import passes
from megatron_prefix.lab.rl.loss import logprob_step
from megatron_prefix.lab.rl.routes import Microbatch, Routes, acting, seen, shape_of
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.tree import cp_layout


def recorded(chunks: list[Any], items: Sequence[Microbatch], spec: ModelSpec) -> Routes:
    """The routes of the rollouts of all ranks; every rank of the job calls this and gets the same.

    Args:
        chunks: this rank's model.
        items: this rank's microbatches, packed or not.
        spec: the model's shape.
    """
    chosen: dict[int, list[Tensor]] = defaultdict(list)
    step = logprob_step()

    def recording(data_iterator: Iterator[Microbatch], model: Any) -> Any:
        output = step(data_iterator, model)
        for router in routers(unwrap(model)).values():
            chosen[router.layer_number].append(router.router_replay.get_recorded_indices())
        return output

    with acting(chunks, "RECORD"), torch.no_grad():
        passes.run(stock_schedule(), recording, chunks, items, forward_only=True)
    lengths = [item["tokens"].shape[1] for item in items]
    device = next(chunks[0].parameters()).device
    table = torch.zeros(sum(lengths), *shape_of(spec), dtype=torch.int32, device=device)
    for router in (r for chunk in chunks for r in routers(unwrap(chunk)).values()):
        _enter(table, router, chosen[router.layer_number], lengths)
    dist.all_reduce(table, group=parallel_state.get_model_parallel_group())
    return _of_all_ranks(items, table.cpu().numpy().astype(np.int16))


def _enter(table: Tensor, router: Any, experts: Sequence[Tensor], lengths: Sequence[int]) -> None:
    """Writes what a router recorded."""
    parts = table[:, router.layer_number - 1].split(list(lengths))
    for part, mine in zip(parts, experts, strict=True):
        part[seen(router, len(part))] = mine.to(part.dtype)


def _of_all_ranks(items: Sequence[Microbatch], table: NDArray[np.int16]) -> Routes:
    """Whole rollouts from the slices of context-parallel ranks, of all data-parallel ranks."""
    ends = np.cumsum([length for item in items for length in _lengths(item)])
    names = [name for item in items for name in _names(item)]
    mine = list(zip(names, np.split(table, ends[:-1]), strict=True))
    size = parallel_state.get_context_parallel_world_size()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (parallel_state.get_context_parallel_rank(), mine), group)
    routes: Routes = {}
    for rank, parts in everyone:
        for name, part in parts:
            whole = routes.setdefault(name, np.zeros((len(part) * size, *part.shape[1:]), np.int16))
            whole[cp_layout.rank_positions(len(whole), rank, size)] = part
    return routes


def _lengths(item: Microbatch) -> list[int]:
    """Positions of a microbatch's rollouts on this rank."""
    if "cu_seqlens" not in item:
        return [item["tokens"].shape[1]]
    return [int(length) // item["cp_size"] for length in item["cu_seqlens"].diff()]


def _names(item: Microbatch) -> list[tuple[str, str]]:
    """Group and uid of its rollouts."""
    if isinstance(item["uid"], tuple):
        return list(zip(item["group"], item["uid"], strict=True))
    return [(item["group"], item["uid"])]
