"""Gradient synchronisation around the schedule.

Every backward of the step runs without synchronisation, since no single one of them is "the last
microbatch" that Megatron's overlapped reduction waits for: the last one is an inner segment's and
touches no output layer.  Afterwards each bucket's reduction is started by hand where Megatron would
have started it from a backward hook (megatron/core/distributed/param_and_grad_buffer.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


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

    Chunks that are interleaved and reduced during the backward are reduced in the order in which
    their backwards end, and that of the stock schedule is another one.
    """
    overlaps = (
        getattr(getattr(m, "ddp_config", None), "overlap_grad_reduce", False) for m in models
    )
    return len(models) > 1 and any(overlaps)


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
) -> None:
    """Starts the reductions that no backward hook has started, then Megatron's finalize.

    Args:
        models: the rank's model chunks.
        config: their configuration.
        num_tokens: trained tokens of the step on this rank (last stage; 0 elsewhere).
        groups: process groups.
        force_all_reduce: see Megatron's schedules.
    """
    for model in models:
        ddp_config = getattr(model, "ddp_config", None)
        if ddp_config is None or not ddp_config.overlap_grad_reduce:
            continue  # finish_grad_sync will reduce; starting here would reduce twice
        for group in model.bucket_groups + model.expert_parallel_bucket_groups:
            if not group.is_first_batch and group.grad_reduce_handle is None:
                group.start_grad_sync(force_all_reduce=force_all_reduce)
    if config.finalize_model_grads_func is not None:
        device = next(models[0].parameters()).device
        total = torch.zeros([], dtype=torch.int, device=device) + num_tokens
        config.finalize_model_grads_func(
            models,
            total if config.calculate_per_token_loss else None,
            pg_collection=groups,
            force_all_reduce=force_all_reduce,
        )
