"""Model calls without gradients, beside the one that a microbatch is taken from.

A preference loss wants log-probs of a reference. Trainers with adapters get them from the model
itself, inside the forward step: adapters off, without gradients (ms-swift's DPO and KTO). Such a
call is the stock model's, in its place: what the trainer has switched for it is as it left it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.megatron.install import vision_tower
from megatron_prefix.moe.told import may_replay
from megatron_prefix.run.rank import Rank

LIKE_BATCHES = 2
"""Dimensions of what a trainer may keep of all microbatches: [samples, positions], no logits."""


def may_be(rank: Rank, *, forward_only: bool) -> bool:
    """Whether forward steps of a call of the schedule may make such calls.

    Without gradients nothing tells a microbatch's own call from another. Behind the first pipeline
    stage a call's input is what the stage before it has sent, which segments do not send. A vision
    tower's rows are kept for a microbatch, whichever call they are for. A queue of routes has an
    entry for each call, in their order.
    """
    alone = len(rank.models) == 1 and rank.num_stages == 1
    replays = rank.has_experts and may_replay(rank.config)
    return alone and not (forward_only or replays) and vision_tower(rank.models[0]) is None


def is_now(model: Any, *, called: bool) -> bool:
    """Whether a call of a language model, in a forward step that may make such calls, is one.

    Args:
        model: the language model.
        called: whether the step has made its own call. What follows that runs in another order on
            every rank, and ranks that share experts would wait for one another.
    """
    apart = not called or model.config.expert_model_parallel_size == 1
    return apart and not torch.is_grad_enabled()


def is_large(output: Any) -> bool:
    """Whether a call's output is too large to be there for all microbatches at once, as what a
    suspended forward step holds is; the stock schedule has one at a time."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return any(one.squeeze(-1).dim() > LIKE_BATCHES for one in tensors)
