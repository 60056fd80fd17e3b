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

import torch
from torch import Tensor

from megatron_prefix.run.overlap import Reductions
from megatron_prefix.run.rank import Rank


@contextlib.contextmanager
def no_sync(rank: Rank) -> Iterator[None]:
    """No gradient leaves the rank inside; the trainer's own `no_sync_func` where it set one."""
    given = rank.config.no_sync_func
    contexts = given if isinstance(given, list) else [given] if given is not None else None
    if contexts is None:
        contexts = [model.no_sync for model in rank.models if hasattr(model, "no_sync")]
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def finish(
    rank: Rank,
    num_tokens: int | Tensor,
    force_all_reduce: bool | None,
    reductions: Reductions | None,
) -> None:
    """Starts the reductions that no backward has started, then Megatron's finalize.

    Args:
        rank: whose gradients they are.
        num_tokens: trained tokens of the step on this rank (last stage; 0 elsewhere).
        force_all_reduce: see Megatron's schedules.
        reductions: of the step, where backwards start some.

    Raises:
        RuntimeError: a gradient came too late for its reduction.
    """
    config = rank.config
    if reductions is not None:
        reductions.start_rest()
    if config.finalize_model_grads_func is not None:
        total = torch.zeros([], dtype=torch.int, device=rank.device) + num_tokens
        config.finalize_model_grads_func(
            rank.models,
            total if config.calculate_per_token_loss else None,
            pg_collection=rank.groups,
            force_all_reduce=force_all_reduce,
        )
    if reductions is not None:
        reductions.check()
