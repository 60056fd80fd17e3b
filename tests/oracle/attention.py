"""Attention by its definition: softmax in fp64 over the keys that a query may see.

Every model of the oracle has it, in both schedules. Where ours runs segments it puts its own in
this one's place; so what is judged is never its own judge.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_prefix.lab.models.local import LocalAttention
from megatron_prefix.layers import attention as known
from tests.oracle import data


class DefinedAttention(LocalAttention):
    """Causal in every sample; a given 4-D mask (True: hidden) takes the causal one's place, as in
    Megatron's own module."""

    def forward(self, query, key, value, attention_mask, *unused, packed_seq_params=None, **more):
        """[positions, rows, heads, width] or, packed, [positions, heads, width]."""
        packed = query.dim() == 3
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        cp = self.pg_collection.cp
        lengths = _lengths(packed_seq_params, len(query) * cp.size())
        sample_q, place_q = self.places(lengths, cp.rank(), cp.size())
        sample_k, place_k = sample_q, place_q
        if cp.size() > 1:
            every = [self.places(lengths, rank, cp.size()) for rank in range(cp.size())]
            sample_k, place_k = (torch.cat(x) for x in zip(*every, strict=True))
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=cp) for x in (key, value)
            )
        seen = (sample_q[:, None] == sample_k) & (place_k <= place_q[:, None])
        window = self.scale_mask_softmax.window_size
        if window is not None:
            seen &= place_k >= place_q[:, None] - window[0]
        seen = seen[None, None]
        if attention_mask is not None and attention_mask.dim() == 4:
            seen = ~attention_mask if window is None else ~attention_mask & seen
        elif attention_mask is not None:
            raise ValueError(f"a mask of {list(attention_mask.shape)}: one of four dimensions")
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
        q, k, v = (x.double() for x in (query, key, value))
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k)
        scores *= self.softmax_scale * (self.scale_mask_softmax.scale or 1)  # by layer: and back
        weights = _softmax(scores.masked_fill(~seen, float("-inf")), self.softmax_offset)
        weights = self.attention_dropout(weights)
        out = torch.einsum("bhqk,kbhd->qbhd", weights, v).to(query.dtype).flatten(2)
        return out.squeeze(1) if packed else out

    def places(self, lengths: list[int], rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Sample and position of what a context-parallel rank holds."""
        held = [torch.from_numpy(data.held(length, rank, ranks)) for length in lengths]
        samples = [torch.full_like(places, number) for number, places in enumerate(held)]
        return torch.cat(samples), torch.cat(held)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Of scores [rows, heads, queries, keys]; a sink [heads] is a key without a value."""
    if sink is None:
        return scores.softmax(-1)
    more = sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, more], -1).softmax(-1)[..., :-1]


class CausalAttention(DefinedAttention):
    """Causal in every sample whatever the mask, as transformer-engine's is."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, _: Any, **more: Any) -> Tensor:
        return super().forward(query, key, value, None, **more)


for each in (DefinedAttention, CausalAttention):
    known.CORES.add(f"{each.__module__}.{each.__qualname__}")
known.IGNORES_MASKS.add(f"{CausalAttention.__module__}.{CausalAttention.__qualname__}")


def _lengths(packing: Any, total: int) -> list[int]:
    if packing is None:
        return [total]
    padded = packing.cu_seqlens_q_padded
    return (packing.cu_seqlens_q if padded is None else padded).diff().tolist()


def put_into(model: Any, *, ignores_masks: bool) -> None:
    """Gives every attention layer of a model one of these modules."""
    which = CausalAttention if ignores_masks else DefinedAttention
    for module in [module for module in model.modules() if hasattr(module, "core_attention")]:
        latent, before = module.config.multi_latent_attention, module.core_attention
        module.core_attention = which(
            module.config, module.layer_number, module.attn_mask_type, module.attention_type,
            softmax_scale=(module if latent else module.config).softmax_scale,
            v_channels=module.config.v_head_dim if latent else None,
            pg_collection=module.pg_collection,
        )  # fmt: skip
        module.core_attention.load_state_dict(before.state_dict())  # its sinks
