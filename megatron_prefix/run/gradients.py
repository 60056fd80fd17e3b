"""Gradient synchronisation around the schedule.

Every backward of the step runs without synchronisation, since no single one of them is "the last
microbatch" that Megatron's overlapped reduction waits for: the last one is an inner segment's and
touches no output layer.  Where Megatron would have started reductions from a backward hook
(megatron/core/distributed/param_and_grad_buffer.py), they are started by hand: during the rank's
last backwards where that can be (run/overlap.py), the rest afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_prefix.run.overlap import Reductions, overlaps


def default_groups() -> ProcessGroupCollection:
    """The process groups that Megatron's schedules take when they are given none."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.ep = parallel_state.get_expert_model_parallel_group(check_initialized=False)
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


def order_shows(models: list[Any]) -> bool:
    """Whether data-parallel ranks see in which order the schedule of another reduces gradients.

    Buckets that are reduced during the backward are reduced in the order in which the stock
    schedule's backward completes them, and ours is a fixed one (run/overlap.py): the two differ for
    chunks that are interleaved, and where neighbouring weights of a layer fill a bucket each.
    """
    return any(map(overlaps, models))


@contextlib.contextmanager
def no_sync(models: list[Any], config: Any) -> Iterator[None]:
    """No gradient leaves the rank inside; the trainer's own `no_sync_func` where it set one."""
    given = config.no_sync_func
    contexts = given if isinstance(given, list) else [given] if given is not None else None
    if contexts is None:
        contexts = [model.no_sync for model in models if hasattr(model, "no_sync")]
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def finish(
    models: list[Any],
    config: Any,
    num_tokens: int | Tensor,
    groups: ProcessGroupCollection,
    force_all_reduce: bool | None,
    reductions: Reductions,
) -> None:
    """Starts the reductions that no backward has started, then Megatron's finalize.

    Args:
        models: the rank's model chunks.
        config: their configuration.
        num_tokens: trained tokens of the step on this rank (last stage; 0 elsewhere).
        groups: process groups.
        force_all_reduce: see Megatron's schedules.
        reductions: of the step.

    Raises:
        RuntimeError: a gradient came too late for its reduction.
    """
    reductions.start_rest()
    if config.finalize_model_grads_func is not None:
        device = next(models[0].parameters()).device
        total = torch.zeros([], dtype=torch.int, device=device) + num_tokens
        config.finalize_model_grads_func(
            models,
            total if config.calculate_per_token_loss else None,
            pg_collection=groups,
            force_all_reduce=force_all_reduce,
        )
    reductions.check()
