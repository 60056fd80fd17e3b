"""[pure] slime and miles deal whole groups to data-parallel ranks.

Both deal in `build_dp_schedule`, on the driver's side, and miles has it from slime. What each step
trains on stays theirs, and so do the budget of tokens, the number of rollouts of fixed microbatches
and what the number of microbatches has to be a multiple of. Their losses are sums over rollouts,
divided by numbers of the whole step; those that are not keep their own dealing.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from megatron_prefix.features.dealing.microbatches import OwnDealing, Ranks, chunked, filled
from megatron_prefix.features.dealing.own import or_own, wrapped
from megatron_prefix.features.dealing.rollouts import Rollouts

NAME = "build_dp_schedule"
PARAMETERS = "args, train_parallel_config, total_lengths, global_batch_size, rollout_indices"
Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]
"""Samples by rank, places in these by rank and microbatch, and by step the number of microbatches
and of rollouts."""


def deal_whole_groups(module: ModuleType) -> None:
    """Lets `slime.utils.dp_schedule`, or miles', deal whole groups."""
    wrapped(module, NAME, PARAMETERS, _dealing)


def _dealing(stock: Callable[..., Schedule]) -> Callable[..., Schedule]:
    @functools.wraps(stock)
    def build_dp_schedule(
        args: Any, train_parallel_config: Mapping[str, int], *lengths: Any, **others: Any
    ) -> Schedule:
        own = stock(args, train_parallel_config, *lengths, **others)
        # Prompts are no argument; the callers of both have what is trained on in `data`.
        data = sys._getframe(1).f_locals.get("data")
        deals = functools.partial(_redealt, args, train_parallel_config, data, own)
        return or_own(stock.__module__, deals, own)

    return build_dp_schedule


def _redealt(args: Any, config: Mapping[str, int], data: Any, own: Schedule) -> Schedule:
    """Raises: OwnDealing."""
    if why := depends_on_microbatches(args):
        raise OwnDealing(why)
    if not isinstance(data, dict) or not {"tokens", "response_lengths"} <= data.keys():
        raise OwnDealing("its caller has no `data` with tokens and response_lengths")
    answers = zip(data["tokens"], data["response_lengths"], strict=True)
    prompts = [len(tokens) - int(answer) for tokens, answer in answers]
    rollouts = Rollouts.of_tokens(data["tokens"], prompts)
    parts: list[list[int]] = [[] for _ in own[0]]
    places: list[list[list[int]]] = [[] for _ in own[0]]
    numbers = []
    for samples in _steps(own):
        ranks = _microbatches(args, config, rollouts.chosen(samples))
        numbers.append(len(ranks[0]))
        for part, place, batches in zip(parts, places, ranks, strict=True):
            for batch in batches:
                place.append(list(range(len(part), len(part) + len(batch))))
                part += [samples[number] for number in batch]
    return parts, places, numbers, own[3]


def _steps(own: Schedule) -> list[list[int]]:
    """The samples of every step, in the order in which they were sampled."""
    parts, places, numbers, _ = own
    ends = list(itertools.accumulate(numbers, initial=0))
    return [
        sorted(
            part[number]
            for part, batches in zip(parts, places, strict=True)
            for batch in batches[start:end]
            for number in batch
        )
        for start, end in itertools.pairwise(ends)
    ]


def _microbatches(args: Any, config: Mapping[str, int], rollouts: Rollouts) -> Ranks:
    """By rank and microbatch, of one step."""
    if not args.use_dynamic_batch_size:
        return chunked(rollouts, config["dp_size"], args.micro_batch_size)
    budget = args.max_tokens_per_gpu * config["cp_size"]
    is_cut = (config["vpp_size"] or 1) > 1
    multiple = config["microbatch_group_size_per_vp_stage"] if is_cut else 1
    return filled(rollouts, config["dp_size"], budget, multiple)


def depends_on_microbatches(args: Any) -> str:
    """Why a loss is another one where microbatches are; "" for those that are not.

    Args:
        args: the command line of slime or miles.
    """
    if getattr(args, "enable_mtp_training", False):
        return "--enable-mtp-training: its loss is a mean over the tokens of each microbatch"
    balanced = getattr(args, "moe_router_load_balancing_type", "none") not in ("none", ["none"])
    coefficients = getattr(args, "moe_aux_loss_coeff", 0)
    is_weighed = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    if (balanced and is_weighed) or getattr(args, "moe_z_loss_coeff", None):
        return "--moe-aux-loss-coeff, --moe-z-loss-coeff: these losses are of each microbatch"
    if getattr(args, "loss_type", "") == "custom_loss":
        return "--loss-type custom_loss: what it is a mean of is not known"
    if getattr(args, "custom_pg_loss_reducer_function_path", None):
        return "--custom-pg-loss-reducer-function-path: what it is a mean of is not known"
    return ""
