"""[pure] ROLL deals whole groups to its data-parallel ranks, balanced by what these run.

Its pipelines order a batch by `batch_balance`, of which every rank then gets one of as many equal
parts. What is here orders it once more after that: groups are dealt to mini-batches, and those of
each to the ranks, as in verl. ROLL's workers shuffle their parts into mini-batches with the seed of
its configuration; a part is in the order from which that shuffle makes the mini-batches dealt here.
Its losses are divided by numbers of the whole mini-batch; those that are not keep its dealing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from types import ModuleType
from typing import Any

from megatron_prefix.features.dealing import verl
from megatron_prefix.features.dealing.microbatches import OwnDealing, Ranks
from megatron_prefix.features.dealing.own import or_own, wrapped
from megatron_prefix.features.dealing.rollouts import Rollouts

NAME = "batch_balance"
PARAMETERS = "batch, dp_size, minibatch_size, logging_prefix, keep_minibatch"
UPDATE = "actor_train"
"""The end of `logging_prefix` before an update; others are before passes for log-probs."""


def deal_whole_groups(module: ModuleType) -> None:
    """Lets `roll.utils.functionals` deal whole groups."""
    wrapped(module, NAME, PARAMETERS, _ordered_again)


def _ordered_again(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def batch_balance(
        batch: Any,
        dp_size: int,
        minibatch_size: int,
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> Any:
        metrics = stock(batch, dp_size, minibatch_size, logging_prefix, keep_minibatch)
        pipeline = sys._getframe(1).f_locals.get("self")  # its configuration is no argument
        config, num = None, 1
        if logging_prefix.endswith(UPDATE):
            config, num = getattr(pipeline, "pipeline_config", ""), len(batch) // minibatch_size
        deals = functools.partial(_dealt, batch, dp_size, num, config)
        if found := or_own("ROLL", deals, None):
            rollouts, ranks, order = found
            batch.reorder(order)
            metrics |= verl.balance_of(rollouts, ranks, logging_prefix)
        return metrics

    return batch_balance


def _dealt(batch: Any, num_ranks: int, num: int, config: Any) -> tuple[Rollouts, Ranks, Any]:
    """The rollouts, those of every rank and mini-batch, and the order of the batch: int [rollouts].

    Args:
        batch: a DataProto.
        num_ranks: data-parallel.
        num: mini-batches of a rank.
        config: the pipeline's; None for a pass without gradients, which is not shuffled.

    Raises:
        OwnDealing: ROLL's dealing stays.
    """
    import torch

    why = "" if config is None else depends_on_microbatches(config)
    if why:
        raise OwnDealing(why)
    if "response_mask" not in batch.batch:
        raise OwnDealing("its batch has no response_mask: prompts are not known")
    names = "input_ids", "attention_mask", "response_mask"
    rollouts = Rollouts.of_masks(*(batch.batch[name] for name in names))
    ranks = verl.dealt(rollouts, num_ranks, num)
    seed = getattr(config, "seed", None)
    order = [n for parts in ranks for n in _before_shuffle(parts, seed)]
    return rollouts, ranks, torch.tensor(order)


def _before_shuffle(parts: Sequence[Sequence[int]], seed: int | None) -> list[int]:
    """A rank's rollouts in the order that `DataProto.make_iterator` shuffles into its mini-batches,
    in its first epoch; one behind the other without a seed."""
    from torch import Generator
    from torch.utils.data import DataLoader

    numbers = list(chain(*parts))
    if seed is None:
        return numbers
    shuffled: Any = DataLoader(
        range(len(numbers)),  # type: ignore[arg-type]  # it has a length and items
        batch_size=len(parts[0]),
        shuffle=True,
        collate_fn=list,
        generator=Generator().manual_seed(seed),
    )
    before = dict(zip(chain(*shuffled), numbers, strict=True))
    return [before[place] for place in range(len(numbers))]


def depends_on_microbatches(config: Any) -> str:
    """Why a loss is another one where microbatches are, or why dealing would not last; "" for
    neither.

    Args:
        config: of a pipeline.
    """
    trained = getattr(config, "actor_train", None)
    if trained is None:
        return "the configuration of its actor is not known"
    if trained.use_dynamic_batching_in_train:
        return "use_dynamic_batching_in_train deals once more, by length"
    if not trained.apply_loss_scale:
        return "apply_loss_scale: without it losses are divided by the number of microbatches"
    for name in ("difficulty_loss_weight", "length_loss_weight"):
        if getattr(config, name, False):
            return f"{name}: its weights are relative to others of each microbatch"
    options = trained.strategy_args.strategy_config
    if options.get("mtp_num_layers"):
        return "mtp_num_layers: its loss is a mean over the tokens of each microbatch"
    has_experts = any(name.startswith("moe_") for name in options) or (
        options.get("expert_model_parallel_size") or 1
    ) > 1  # fmt: skip
    is_balanced = options.get("moe_router_load_balancing_type") not in ("none", ["none"])
    if has_experts and (
        (is_balanced and options.get("moe_aux_loss_coeff") != 0) or options.get("moe_z_loss_coeff")
    ):
        return "moe_aux_loss_coeff is not 0, or moe_z_loss_coeff: these losses are of microbatches"
    return ""
