"""Rollouts' microbatches packed into THD microbatches: what trainers give their models.

A pack's fields are those of its rollouts one behind the other, [1, positions of all]; positions
count from 0 in every rollout, and attention does not look from one into another. With
`calculate_per_token_loss` False Megatron divides the loss of a microbatch by its trained tokens, so
a pack's loss is the mean over the trained tokens of all its rollouts, a long rollout counting more
than a short one, and the step's loss is the mean over packs. With True it is the mean over the
trained tokens of the step, however they are packed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.local import LocalAttention
from megatron_prefix.lab.platforms import cpu
from megatron_prefix.lab.rl.baseline import Baseline, pack_sizes

Microbatch = dict[str, Any]


def microbatches(
    items: Sequence[Microbatch], baseline: Baseline, *, cp_size: int = 1, least: int = 1
) -> list[Microbatch]:
    """Microbatches of one rollout each as the baseline has them.

    Args:
        items: of `batches.microbatch`, or a context-parallel rank's slices of them.
        baseline: "rollout" packs none.
        cp_size: context-parallel ranks.
        least: see `pack_sizes`.
    """
    step = -1 if baseline.backwards else 1
    items = [items[place] for place in baseline.order(len(items))]
    if not baseline.packed:
        return items[::step]
    lengths = [cp_size * item["tokens"].shape[1] for item in items]
    rest = iter(items)
    sizes = pack_sizes(lengths, baseline.pack_tokens, least)
    return [pack(list(itertools.islice(rest, size))[::step], cp_size) for size in sizes][::step]


def pack(items: Sequence[Microbatch], cp_size: int = 1) -> Microbatch:
    """One microbatch of several rollouts.

    Args:
        items: whole microbatches of one rollout each, or the slices of one context-parallel rank.
        cp_size: context-parallel ranks, each of which has the same share of every rollout.

    Returns:
        Every tensor of the items concatenated, [1, positions on this rank]; `cu_seqlens` (int32,
        [rollouts + 1]) says where rollouts begin and end in the whole pack, padding belonging to
        the rollout before it, and `cp_size` repeats the argument. `group` and `uid` are the items'.

    Raises:
        ValueError: some items have a field and some have not.
    """
    fields = [{n for n, v in item.items() if isinstance(v, Tensor)} for item in items]
    if any(names != fields[0] for names in fields):
        raise ValueError(f"rollouts of one pack have different fields: {fields}")
    lengths = [cp_size * item["tokens"].shape[1] for item in items]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    joined = {name: torch.cat([item[name] for item in items], dim=1) for name in fields[0]}
    names = {name: tuple(item[name] for item in items) for name in ("group", "uid")}
    return {**joined, "cu_seqlens": ends, "cp_size": cp_size, **names}


def packed_seq_params(item: Mapping[str, Any], device: torch.device) -> PackedSeqParams | None:
    """Megatron's description of a pack; None if the microbatch is one rollout.

    Padding counts as positions of its rollout, as trainers have it (slime, verl), so the padded
    ends are the ends. Transformer-engine compares the two on the host in every layer, so the padded
    ones are given only to its context parallelism, which reads them.
    """
    if "cu_seqlens" not in item:
        return None
    longest = int(item["cu_seqlens"].diff().max())  # before it is on the device
    ends = item["cu_seqlens"].to(device, non_blocking=True)
    padded = ends if item["cp_size"] > 1 else None
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip


def check(chunks: Sequence[Any], baseline: Baseline) -> None:
    """Refuses models whose stock run on packed microbatches would fail or mean something else.

    Raises:
        UserError: naming what takes no packs.
    """
    if not baseline.packed:
        return
    for reason in itertools.chain.from_iterable(map(_reasons, chunks)):
        raise UserError(f"--baseline packed: {reason}; use --baseline rollout")


def _reasons(chunk: Any) -> Iterator[str]:
    for name, module in chunk.named_modules():
        if isinstance(module, DotProductAttention) and not isinstance(module, LocalAttention):
            yield f"{name} is {type(module).__name__}, which takes no packed sequences"
        kind = type(module).__name__
        if kind == "GatedDeltaNet" and not hasattr(module, "_resolve_cu_seqlens"):
            yield f"{name} is {kind}, which takes no packed sequences before megatron-core 0.18"
        if kind == "MambaMixer" and cpu.enabled():
            yield f"{name} is {kind}, whose kernels for the CPU pack no sequences"
        if hasattr(module, "get_aux_loss_coeff") and module.get_aux_loss_coeff("seq_aux_loss"):
            yield f"seq_aux_loss of {name} balances by sample, and Megatron takes a pack for one"
