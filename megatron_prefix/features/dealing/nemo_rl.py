"""[pure] NeMo-RL deals whole groups to data-parallel ranks where it packs sequences.

`BatchedDataDict.shard_by_batch_size` packs each chunk of a batch into bins and gives these to ranks
in turn. What is here gives it other bins: the microbatches of every rank, in turn. All else is its
own, also what puts results back into the order of the batch. Its losses are divided by numbers of
the whole step; models with losses of each microbatch keep its dealing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron_prefix.features.dealing.microbatches import OwnDealing, filled
from megatron_prefix.features.dealing.own import or_own, wrapped
from megatron_prefix.features.dealing.rollouts import Rollouts

OWNER, NAME, PACKER = "BatchedDataDict", "shard_by_batch_size", "get_packer"
PARAMETERS = (
    "self, shards, batch_size, allow_uneven_shards, dynamic_batching_args, sequence_packing_args"
)
PACKER_PARAMETERS = "algorithm, bin_capacity, collect_metrics, min_bin_count, bin_count_multiple"
Bins = list[list[int]]

_BINS: ContextVar[list[Bins] | None] = ContextVar("_BINS", default=None)
"""Of every chunk of the batch that is being dealt; None: NeMo-RL packs."""


def deal_whole_groups(module: ModuleType) -> None:
    """Lets `nemo_rl.distributed.batched_data_dict` deal whole groups."""
    wrapped(module, PACKER, PACKER_PARAMETERS, _packing)
    wrapped(getattr(module, OWNER, module), NAME, PARAMETERS, _dealing)


def _packing(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_packer(*args: Any, **options: Any) -> Any:
        bins = _BINS.get()
        if bins is None:
            return stock(*args, **options)
        chunks = iter(bins)
        return SimpleNamespace(pack=lambda sequence_lengths: next(chunks))

    return get_packer


def _dealing(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def shard_by_batch_size(self: Any, shards: int, *args: Any, **options: Any) -> Any:
        packing, is_padded = (
            options.get(name) for name in ("sequence_packing_args", "dynamic_batching_args")
        )
        if (packing is None and is_padded is None) or shards == 1:
            return stock(self, shards, *args, **options)
        size = args[0] if args else options.get("batch_size")
        policy = sys._getframe(1).f_locals.get("self")  # its configuration is no argument
        deals = functools.partial(_bins, self, shards, size, packing, policy)
        token = _BINS.set(or_own("NeMo-RL", deals, None))
        try:
            return stock(self, shards, *args, **options)
        finally:
            _BINS.reset(token)

    return shard_by_batch_size


def _bins(data: Any, shards: int, size: int | None, packing: Any, policy: Any) -> list[Bins]:
    """Raises: OwnDealing."""
    if packing is None:
        raise OwnDealing("dynamic batching cuts microbatches of rollouts of one length")
    if why := depends_on_microbatches(getattr(policy, "cfg", None)):
        raise OwnDealing(why)
    if not {"input_ids", "token_mask", packing["input_lengths_key"]} <= set(data.keys()):
        raise OwnDealing("its batch has no input_ids, or no token_mask: prompts are not known")
    rollouts, limit = _rollouts(data, packing), packing["max_tokens_per_microbatch"]
    if max(rollouts.lengths, default=0) > limit:
        raise OwnDealing(f"a rollout is longer than {limit} tokens")
    size, num = size or len(rollouts.groups), len(rollouts.groups)
    chunks = [range(start, start + size) for start in range(0, num, size)]
    return [_in_turn(filled(rollouts.chosen(chunk), shards, limit)) for chunk in chunks]


def _in_turn(ranks: list[Bins]) -> Bins:
    return [batch for batches in zip(*ranks, strict=True) for batch in batches]


def _rollouts(data: Any, packing: Mapping[str, Any]) -> Rollouts:
    """Lengths as they are packed, padded to a multiple."""
    multiple = packing["sequence_length_pad_multiple"]
    lengths = [int(length) for length in data[packing["input_lengths_key"]]]
    prompts = [
        next(iter(mask[:length].nonzero().flatten().tolist()), length)
        for mask, length in zip(data["token_mask"], lengths, strict=True)
    ]
    rollouts = Rollouts.of_tokens(data["input_ids"], prompts)
    return rollouts._replace(lengths=[-(-length // multiple) * multiple for length in lengths])


def depends_on_microbatches(config: Any) -> str:
    """Why a loss is another one where microbatches are; "" for those that are not.

    Args:
        config: a policy's.
    """
    if config is None:
        return "the configuration of the policy is not known"
    megatron = config.get("megatron_cfg") or {}
    if megatron.get("mtp_num_layers"):
        return "mtp_num_layers: its loss is a mean over the tokens of each microbatch"
    if megatron.get("moe_router_load_balancing_type", "none") not in ("none", ["none"]):
        return "moe_router_load_balancing_type: its loss is of each microbatch"
    return ""
