"""Small models with DeepSeek's sparse attention in fp64: Megatron's, with the rotation that it has
no CPU kernel for; and a stand-in for slime's and miles' own.

The latter was written for these tests; who calls whom, and with what, is as in
slime_plugins/models/glm5 of slime at 624b824a8 and miles_plugins/models/glm5 of miles at 31f1ca961.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from megatron_prefix.lab.models.local import Float64Kept
from megatron_prefix.lab.platforms.sparse_kernels import (
    SparseMLA,
    fused_apply_rotary_pos_emb_thd,
    generate_varlen_mask_params,
    lighting_indexer,
)
from tests.cases import DSA
from tests.harness.one_rank import small_model

DENSE: dict[str, Any] = {"num_layers": 2, "num_moe_experts": None}
HEADS, WIDTH, TOPK = 16, 16, 6
"""Of the own indexer, with so many heads that no score is zero; and what a query reads."""


def rotated(x: Tensor) -> Tensor:
    """The Hadamard transform of the last dimension, a power of two, as an orthogonal matrix."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ (matrix * x.shape[-1] ** -0.5)


@contextlib.contextmanager
def rotating() -> Iterator[None]:
    """For a while Megatron's indexers have it, whatever the dtype, and the backward of their loss
    (since 0.17 a function of its own) computes in float64."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    name = "bwd_fused_indexer_loss_naive"
    backward = getattr(dsa, name, None)

    def in_float64(*args: Any, **options: Any) -> Any:
        with Float64Kept(is_sparse=True):
            return backward(*args, **options)

    replaced = {"rotate_activation": rotated, name: in_float64}
    with mock.patch.multiple(dsa, create=backward is None, **replaced):
        yield


def model_of(fields: dict[str, Any], **options: Any) -> Any:
    """A small model with these fields of Megatron's config besides; equal ones, equal weights."""
    spec = {**DENSE, **options.pop("spec", {})}
    overrides = {**DSA, **fields}
    return small_model("tiny-deepseek", spec=spec, config_overrides=overrides, **options)


class DSAMultiLatentAttention(MLASelfAttention):
    """The part of both trainers' attention that runs."""

    _HOLDER_ATTR = "_dsa_index_share_topk_holder"

    def forward(self, hidden_states, attention_mask, packed_seq_params=None, **_):
        q, kv, wv, index_query, index_key, head_weights = self.get_absorb_query_key_value_tensors(
            hidden_states, packed_seq_params
        )

        def fused_select_topk(index_q, index_k, w, starts, ends, block_size=10):
            chosen = []
            for start in range(0, len(index_q), block_size):
                block = slice(start, start + block_size)
                _, topk_indices = lighting_indexer(
                    index_q[block], index_k, w[block], starts[block].to(torch.int32),
                    ends[block].to(torch.int32), self.index_topk, topk_indices=None,
                )  # fmt: skip
                chosen.append(topk_indices)
            return torch.cat(chosen).unsqueeze(1)

        if self.index_share and not hasattr(packed_seq_params, self._HOLDER_ATTR):
            setattr(packed_seq_params, self._HOLDER_ATTR, {})
        holder = getattr(packed_seq_params, self._HOLDER_ATTR, None)
        if self.skip_topk:
            topk_indices = holder[self._source_layer]
        else:
            group, weights = parallel_state.get_context_parallel_group(), head_weights[..., None]
            bounds = (
                scatter_to_sequence_parallel_region(x, group=group)
                for x in generate_varlen_mask_params(packed_seq_params.cu_seqlens_q)
            )
            topk_indices = fused_select_topk(index_query, index_key, weights, *bounds)
            if self.index_share:
                holder[self.layer_number] = topk_indices
        core_attn_out, _ = SparseMLA.apply(q, kv, topk_indices, self.softmax_scale)
        core_attn_out = torch.einsum("thm,hdm->thd", core_attn_out, wv)
        return self.linear_proj(core_attn_out.reshape(len(q), 1, -1))

    def get_absorb_query_key_value_tensors(self, hidden_states, packed_seq_params):
        config, parts = self.config, parallel_state.get_context_parallel_group()
        angles = self.rotary_pos_emb(packed_seq_params.max_seqlen_q, packed_seq=True)
        angles = (angles[0] if isinstance(angles, tuple) else angles).squeeze(0)

        def whole(x):
            return gather_from_sequence_parallel_region(x) if config.sequence_parallel else x

        def fuse_rope(x, gathered=False):
            every = x if gathered else x.repeat(parts.size(), 1, 1)
            every = self.turned(every, packed_seq_params.cu_seqlens_q, angles)
            return every if gathered else every.chunk(parts.size())[parts.rank()]

        low = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0].squeeze(1))
        rows = self.linear_kv_down_proj(hidden_states)[0]
        latents, k_rope = rows.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        latents, k_rope = (
            gather_from_sequence_parallel_region(whole(x), group=parts)
            for x in (self.kv_layernorm(latents), k_rope)
        )
        q = self.linear_q_up_proj(low)[0].unflatten(-1, (-1, self.q_head_dim))
        q_plain, q_rope = q.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        w_kc, w_vc = self.linear_kv_up_proj.weight.unflatten(
            0, (-1, config.qk_head_dim + config.v_head_dim)
        ).split([config.qk_head_dim, config.v_head_dim], 1)
        q_plain = torch.einsum("thd,hdm->thm", q_plain, w_kc)
        query = torch.cat([q_plain, fuse_rope(q_rope)], -1)
        key = torch.cat([latents, fuse_rope(k_rope, gathered=True)], -1)
        if self.skip_topk:
            return query, key, w_vc, None, None, None
        index = self.indexed(whole, fuse_rope, low.detach(), hidden_states.detach(), parts)
        return query, key, w_vc, *index

    def indexed(self, whole, fuse_rope, low, hidden_states, parts):
        """Queries and keys of the indexer, and weights of its heads."""
        index_q = whole(self.wq_b(low).unflatten(-1, (self.num_index_heads, -1)))
        index_k = gather_from_sequence_parallel_region(whole(self.wk(hidden_states)), group=parts)
        rotated = self.config.qk_pos_emb_head_dim
        index_q, index_k = (
            torch.cat([x[..., rotated:], fuse_rope(x[..., :rotated], gathered)], -1)
            for x, gathered in ((index_q, False), (index_k, True))
        )
        return index_q, index_k.squeeze(1), whole(self.weights_proj(hidden_states).squeeze(1))


class DSAMLASelfAttention(DSAMultiLatentAttention):
    """The self-attention of a layer, whose module has Megatron's other parts."""

    def __init__(self, config, *args, sharing=(1, 0), **options):
        super().__init__(config, *args, **options)
        (every, first), self.num_index_heads, self.index_topk = sharing, HEADS, TOPK
        self.turned, self.index_share = fused_apply_rotary_pos_emb_thd, every > 1
        self.skip_topk = max(self.layer_number - first, 0) % every != 0
        self._source_layer = self.layer_number - max(self.layer_number - first, 0) % every
        sizes = {"wq_b": (config.q_lora_rank, HEADS * WIDTH), "wk": (config.hidden_size, WIDTH)}
        sizes["weights_proj"] = config.hidden_size, HEADS
        for name, size in sizes.items() if not self.skip_topk else ():
            setattr(self, name, nn.Linear(*size, bias=False))


@contextlib.contextmanager
def own_sparse(every: int = 1, first: int = 0) -> Iterator[None]:
    """GPTModels that are built meanwhile have such layers, of which only some have an indexer."""
    stock = gpt_model.GPTModel

    def with_own(config: Any, block: Any, **options: Any) -> Any:
        config.index_num_attention_heads, config.index_head_dim = HEADS, WIDTH
        config.index_topk_freq, config.index_skip_topk_offset = every, first
        block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
        for layer in block.layer_specs:
            own = layer.submodules.self_attention
            own.module, own.params = DSAMLASelfAttention, {**own.params, "sharing": (every, first)}
        return stock(config, block, **options)

    with mock.patch.object(gpt_model, "GPTModel", with_own):
        yield
