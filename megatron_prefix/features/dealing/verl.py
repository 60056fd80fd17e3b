"""[pure] verl deals whole groups to its data-parallel ranks, balanced by what these run.

Both of its trainers order a batch in `_balance_batch`, of which every rank then gets one of as many
equal parts. What is here orders it once more after that. Ranks cut their parts into mini-batches,
and only what is in one of these is shared: so groups are dealt to mini-batches first, and those of
each to the ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.features.dealing.deal import DealtCosts
from megatron_prefix.features.dealing.rollouts import Rollouts

PLACES = {
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",
    "verl.trainer.ppo.v1.trainer_base": "PPOTrainer",
}
"""Modules, and in each the class whose `_balance_batch` is replaced; the second is verl's default
(`trainer.use_v1`)."""
NAME, PARAMETERS = "_balance_batch", "self, batch, metrics, logging_prefix, keep_minibatch"


def deal_whole_groups(module: ModuleType) -> None:
    """Lets the trainer of one of the modules in `PLACES` deal whole groups.

    Raises:
        UserError: it has no such function, or that takes other arguments.
    """
    owner = vars(module).get(PLACES[module.__name__])
    stock = getattr(owner, NAME, None)
    parameters = ", ".join(inspect.signature(stock).parameters) if callable(stock) else "nothing"
    if parameters != PARAMETERS:
        raise UserError(
            f"{module.__name__}: {PLACES[module.__name__]}.{NAME} takes {parameters}, and not"
            f" {PARAMETERS}: this verl deals otherwise, so do without"
            " megatron_prefix.auto.whole_groups"
        )
    setattr(owner, NAME, _ordered_again(stock))  # type: ignore[arg-type]  # it is callable


def _ordered_again(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def balanced(
        self: Any,
        batch: Any,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> Any:
        if keep_minibatch:
            raise UserError(
                "keep_minibatch=True and megatron_prefix.auto.whole_groups: groups are dealt to"
                " mini-batches, too; do without one of the two"
            )
        returned = stock(self, batch, metrics, logging_prefix)
        batch = batch if returned is None else returned  # one of the two orders it in place
        rollouts = rollouts_of(batch)
        num_ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        ranks = dealt(rollouts, num_ranks, _mini_batches(self.config, len(rollouts.groups)))
        _reorder(batch, [number for parts in ranks for part in parts for number in part])
        metrics.update(balance_of(rollouts, ranks, logging_prefix))
        return returned

    return balanced


def dealt(rollouts: Rollouts, num_ranks: int, num_mini_batches: int) -> list[list[list[int]]]:
    """Numbers of rollouts, by rank and mini-batch: equally many in each.

    Args:
        rollouts: as many as ranks times mini-batches, or a multiple.
        num_ranks: data-parallel.
        num_mini_batches: of a rank.
    """
    dealt_costs = rollouts.dealt_costs
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for share in rollouts.dealt(num_mini_batches, equal=True):
        places = rollouts.chosen(share).dealt(num_ranks, equal=True)
        parts = [[share[place] for place in part] for part in places]
        parts.sort(key=dealt_costs.load, reverse=True)
        # Passes for log-probs run all mini-batches at once: the heaviest part goes to the rank that
        # has least so far.
        ranks.sort(key=lambda before: sum(map(dealt_costs.load, before)))
        for before, part in zip(ranks, parts, strict=True):
            before.append(part)
    return ranks


def _mini_batches(config: Any, num_rollouts: int) -> int:
    """Of a batch; 1 if they would not be equal, which the engine refuses by itself."""
    options = config.actor_rollout_ref
    size = options.actor.ppo_mini_batch_size * options.rollout.n
    return 1 if num_rollouts % size else num_rollouts // size


def balance_of(rollouts: Rollouts, ranks: list[list[list[int]]], prefix: str) -> dict[str, float]:
    """verl's own of the dealing, and the tokens that are executed: by a rank in the mean, and by
    the slowest one of every mini-batch."""
    sums = [sum(rollouts.lengths[number] for part in parts for number in part) for parts in ranks]
    dealt_costs = DealtCosts.of(*rollouts)
    loads = [[dealt_costs.load(part) for part in parts] for parts in zip(*ranks, strict=True)]
    return {
        f"{prefix}/balanced_min": min(sums),
        f"{prefix}/balanced_max": max(sums),
        f"{prefix}/executed_mean": sum(map(sum, loads)) / len(ranks),
        f"{prefix}/executed_max": sum(map(max, loads)),
    }


def rollouts_of(batch: Any) -> Rollouts:
    """What is known of a batch on the driver.

    Args:
        batch: a DataProto, with prompts padded on the left; or a KVBatchMeta, whose keys are
            UID_SESSION_INDEX.

    Raises:
        UserError: it lacks something.
    """
    try:
        if hasattr(batch, "tags"):
            groups = [key.rsplit("_", 2)[0] for key in batch.keys]
            lengths = [int(tag["seq_len"]) for tag in batch.tags]
            return Rollouts(groups, lengths, [int(tag["prompt_len"]) for tag in batch.tags])
        mask = batch.batch["attention_mask"]
        prompts = mask[:, : batch.batch["prompts"].shape[1]]
        groups = [str(uid) for uid in batch.non_tensor_batch["uid"]]
        return Rollouts(groups, mask.sum(-1).tolist(), prompts.sum(-1).tolist())
    except (AttributeError, KeyError) as error:
        raise UserError(
            f"verl's {type(batch).__name__} lacks {error}: groups are not known; do without"
            " megatron_prefix.auto.whole_groups"
        ) from None


def _reorder(batch: Any, order: list[int]) -> None:
    import torch

    batch.reorder(order if hasattr(batch, "tags") else torch.tensor(order))
