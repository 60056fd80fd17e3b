"""Rollouts -> microbatches with the fields of the GRPO loss, one rollout per microbatch.

A rollout of n tokens has n-1 positions: position i reads token i and predicts token i+1. So the
trained token t belongs to position t-1, and every field of a microbatch is [1, n-1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.tree import cp_layout

STD_EPS = 1e-6
"""Added to a group's standard deviation, so nearly equal rewards do not give huge advantages."""


def advantages(group: Group, *, divide_by_std: bool = True) -> list[float]:
    """One advantage a rollout: how much better than the group its reward is.

    (reward - mean) / (std + STD_EPS), with the sample standard deviation (n-1 in the denominator):
    "DeepSeekMath", section 4.1.2. With equal rewards, and in a group of one, all advantages are
    exactly 0. A rollout that has its own advantage keeps it; its reward still counts for the
    others.

    Args:
        divide_by_std: False: only the difference from the mean ("Understanding R1-Zero-
            Like Training: A Critical Perspective", section 3.2: no bias towards easy and hard
            groups).

    Raises:
        UserError: rewards so large that the result is not finite.
    """
    rewards = np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        values = _normalised(rewards, divide_by_std)
    if not np.isfinite(values).all():
        largest = float(np.abs(rewards).max())
        raise UserError(
            f"group {group.name}: advantages of rewards up to {largest:g} are not finite; scale "
            "the rewards down"
        )
    own = [rollout.advantage for rollout in group.rollouts]
    return [float(v) if a is None else float(a) for v, a in zip(values, own, strict=True)]


def with_advantages(group: Group, *, divide_by_std: bool = True) -> Group:
    """The group with an advantage on every rollout, so that the group can be split."""
    values = advantages(group, divide_by_std=divide_by_std)
    pairs = zip(group.rollouts, values, strict=True)
    return replace(group, rollouts=tuple(replace(r, advantage=value) for r, value in pairs))


def _normalised(rewards: NDArray[np.float64], divide_by_std: bool) -> NDArray[np.float64]:
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    difference = rewards - rewards.mean()
    return difference / (rewards.std(ddof=1) + STD_EPS) if divide_by_std else difference


def microbatch(
    rollout: Rollout,
    advantage: float,
    *,
    old_logprobs: NDArray[np.float64] | None = None,
    ref_logprobs: NDArray[np.float64] | None = None,
    multiple: int = 1,
) -> dict[str, Any]:
    """One item of the data iterator, for one rollout of n tokens.

    Args:
        advantage: of the trained tokens.
        old_logprobs: float [trained tokens], in the order of the rollout's spans; None takes the
            rollout's own, and if it has none the microbatch has no such field.
        ref_logprobs: the reference model's, likewise; None leaves the field out.
        multiple: positions are padded at the end to a multiple of it (tp under sequence
            parallelism, times 2*cp with context parallelism); padding is not trained.

    Returns:
        CPU tensors [1, positions], positions being n-1 and padding: `tokens`, `labels` and
        `position_ids` (int64), `loss_mask` (float32, 0 or 1), and, 0 on positions that are not
        trained, `advantages`, `old_logprobs`, `ref_logprobs` (float64). The strings `group` and
        `uid`. If the rollout has routes, `routes` (int16 [1, positions, layers, topk]).
    """
    trained = rollout.loss_mask[1:]
    padding = -len(trained) % multiple
    old = rollout.old_logprobs if old_logprobs is None else old_logprobs
    item: dict[str, Any] = {
        "tokens": _row(rollout.tokens[:-1].astype(np.int64), padding),
        "labels": _row(rollout.tokens[1:].astype(np.int64), padding),
        "position_ids": _row(np.arange(len(trained) + padding), 0),
        "loss_mask": _row(trained.astype(np.float32), padding),
        "advantages": _row(trained * np.float64(advantage), padding),
        "group": rollout.group,
        "uid": rollout.uid,
    }
    for name, values in (("old_logprobs", old), ("ref_logprobs", ref_logprobs)):
        if values is not None:
            item = with_logprobs(item, name, values)
    if rollout.routes is not None:  # padding goes to any experts, each once
        some = np.tile(np.arange(rollout.routes.shape[2]), (padding, rollout.routes.shape[1], 1))
        whole = np.concatenate([rollout.routes, some]).astype(np.int16)
        item["routes"] = torch.from_numpy(whole).unsqueeze(0)
    return item


def _row(values: NDArray[Any], padding: int) -> Tensor:
    """[n] -> [1, n + padding], padded with zeros."""
    return torch.from_numpy(np.pad(values, (0, padding))).unsqueeze(0)


def with_logprobs(
    item: Mapping[str, Any], name: str, logprobs: NDArray[np.float64]
) -> dict[str, Any]:
    """A microbatch with the log-probs of its trained tokens as another field [1, positions].

    Args:
        item: whole, or a context-parallel rank's slice.
        name: `old_logprobs` or `ref_logprobs`.
        logprobs: [trained tokens], in the order of their positions.
    """
    column = torch.zeros_like(item["advantages"])
    column[item["loss_mask"] != 0] = torch.from_numpy(logprobs).to(column.dtype)
    return {**item, name: column}


def on_cp_rank(item: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """A microbatch's slice on one of `size` context-parallel ranks: its pieces of the zig-zag.

    Tensors with positions, [1, positions], become [1, positions/size]; everything else is
    unchanged. The same slices as Megatron's get_batch_on_this_cp_rank.
    """
    length = item["tokens"].shape[1]
    held = torch.from_numpy(cp_layout.rank_positions(length, rank, size))

    def sliced(value: Any) -> Any:
        per_position = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
        return value[:, held] if per_position else value

    return {name: sliced(value) for name, value in item.items()} if size > 1 else dict(item)


def trained_logprobs(item: Mapping[str, Any], logprobs: Tensor) -> NDArray[np.float64]:
    """The log-probs of the trained tokens, from a pass over all positions.

    Args:
        item: the microbatch as `microbatch` made it, or a context-parallel rank's slice.
        logprobs: [positions], of all its positions.

    Returns:
        float64 [trained tokens], in the order of the rollout's spans.
    """
    kept = item["loss_mask"][0] != 0
    return logprobs.detach().cpu()[kept].to(torch.float64).numpy()


def pinned(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The microbatches in page-locked memory, from which copies to a GPU are asynchronous."""
    return [
        {name: v.pin_memory() if isinstance(v, Tensor) else v for name, v in item.items()}
        for item in items
    ]
