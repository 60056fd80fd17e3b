"""Modules for Megatron's local layer spec, for layouts that Megatron's own ones refuse."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch.overrides import TorchFunctionMode

from megatron_prefix.layers import attention as segments
from megatron_prefix.tree import cp_layout


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, built as Megatron builds its norms, by one plus the weight if it is so.

    Megatron's own wrapper refuses sequence parallelism (transformer/torch_norm.py:32). It only
    needs a flag on the weight: each rank has only its part of the sequence, so
    `finalize_model_grads` must sum the weight's gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size], of any dtype; one plus the weight is not rounded to 16 bit."""
        if not self.zero_centered:
            return super().forward(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        return torch.nn.functional.rms_norm(x.to(wide), self.normalized_shape, scale, self.eps).to(
            x.dtype
        )


class LocalAttention(DotProductAttention):
    """Megatron's local attention, and what it refuses: packed samples (THD), context parallelism.

    Without either it is the stock module.  With context parallelism stock code refuses to build it
    (transformer/dot_product_attention.py:58), because it cannot see the other ranks' keys.  Here
    they are gathered by the collective of Megatron's own sequence parallelism, whose backward
    reduces and scatters, and a mask by position takes the place of the causal one.  Samples of a
    pack attend one by one, so it holds the scores of one sample at once, against all its keys: a
    reference, and a stock schedule for small models.  The prefix schedule replaces the instance's
    `forward` while a segment runs.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        k_channels: int | None = None,  # of MLA, as the next; each call has them
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        if config.context_parallel_size > 1:
            config = copy.copy(config)
            config.context_parallel_size = 1
        super().__init__(config, *args, **kwargs)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Causal attention of every sample to itself, [positions, batch, heads, dim] or packed.

        With context parallelism a rank gives its zig-zag slices; packed samples [positions, heads,
        dim] are those of `packed_seq_params`, padding belonging to the sample before.
        """
        group = self.pg_collection.cp
        if packed_seq_params is None and group.size() == 1:
            return self._sample(query, key, value, attention_mask, *args, **kwargs)
        if attention_mask is not None:
            raise ValueError("packed or context-parallel local attention is causal: pass no mask")
        packed = query.dim() == 3
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        lengths = _lengths(packed_seq_params) if packed else [group.size() * len(query)]
        if group.size() > 1:
            order = torch.from_numpy(cp_layout.view_order(lengths, group.size())).to(query.device)
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=group)[order]
                for x in (key, value)
            )
        queries = query.split([length // group.size() for length in lengths])
        samples = zip(lengths, queries, key.split(lengths), value.split(lengths), strict=True)
        window = self.scale_mask_softmax.window_size
        hidden = functools.partial(
            _hidden, rank=group.rank(), size=group.size(), window=window, device=query.device
        )
        outputs = [
            self._sample(q, k, v, hidden(length), *args, **kwargs) for length, q, k, v in samples
        ]
        output = torch.cat(outputs)
        return output.squeeze(1) if packed else output

    def _sample(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: Any, *more: Any,
        **named: Any,
    ) -> torch.Tensor:  # fmt: skip
        """[queries, batch, heads, dim] -> [queries, batch, heads * dim]; see `_hidden`."""
        # In MLA values have a width of their own; in packs 0.19 pads them to that of queries.
        self.hidden_size_per_partition = query.shape[2] * value.shape[3]
        softmax = self.scale_mask_softmax
        window = softmax.window_size
        if self.pg_collection.cp.size() > 1:
            softmax.window_size = None  # with one it ignores a mask that is given
        try:
            return super().forward(query, key, value, hidden, *more, **named)
        finally:
            softmax.window_size = window


# Its rule is that of Megatron's own: segments may take its place.
segments.CORES.add(f"{LocalAttention.__module__}.{LocalAttention.__qualname__}")


class SdpaAttention(LocalAttention):
    """The same attention by torch's `scaled_dot_product_attention`, for both layer specs.

    Its sums are the same, added up in another order: see lab/verify/replay.py.
    """

    def _sample(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: Any, *more: Any,
        **named: Any,
    ) -> torch.Tensor:  # fmt: skip
        shared = query.shape[2] // key.shape[2]  # heads of queries that share one of keys
        key, value = (x.repeat_interleave(shared, dim=2) for x in (key, value))
        mask = None if hidden is None else ~hidden
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        return output.permute(2, 0, 1, 3).flatten(2)


def localize(submodules: Any, config: Any) -> None:
    """Puts the modules of this file into the spec of one of Megatron's local layers."""
    submodules.input_layernorm = RMSNorm
    submodules.pre_mlp_layernorm = RMSNorm
    attention = submodules.self_attention.submodules
    if config.multi_latent_attention:
        _localize_latent(attention, config)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = _sparse() if is_dsa(config) else LocalAttention


def is_dsa(config: Any) -> bool:
    """Whether attention is DeepSeek's sparse one."""
    return getattr(config, "experimental_attention_variant", None) == "dsa"


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, built as Megatron builds its norms; see `RMSNorm`."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _sparse() -> Any:
    """Core attention of DeepSeek's sparse attention."""
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec

    class Duplicated(Linear):  # type: ignore[misc]
        def __init__(self, *sizes: int, parallel_mode: str, **options: Any) -> None:
            super().__init__(*sizes, **options)

    indexer = dsa.DSAIndexerSubmodules(
        linear_wq_b=Duplicated, linear_wk=Duplicated, k_norm=LayerNorm,
        linear_weights_proj=Duplicated,
    )  # fmt: skip
    within = dsa.DSAttentionSubmodules(indexer=ModuleSpec(dsa.DSAIndexer, submodules=indexer))
    return ModuleSpec(dsa.DSAttention, submodules=within)


def copy_outputs(model: Any) -> None:
    """Makes the second projection of every expert with biases return a tensor of its own.

    Megatron adds the bias in place (transformer/mlp.py:247), which autograd forbids on what its own
    linear layer returns; with transformer-engine's it works.
    """
    for name, module in model.named_modules():
        if name.endswith("linear_fc2") and ".experts." in name:
            module.forward = _copying(module.forward)


def _copying(stock: Any) -> Any:
    def forward(x: torch.Tensor) -> Any:
        output, bias = stock(x)
        return output.clone(), bias

    return forward


def _localize_latent(attention: Any, config: Any) -> None:
    """The same of MLA.

    Every rank has the whole of the projections down to latents, as in transformer-engine's spec.
    With Megatron's column-parallel ones the gradient of the rotated part of the keys, which is one
    for all heads, misses the heads of other ranks.
    """
    from megatron.core.post_training.modelopt.layers import Linear

    if config.qk_layernorm:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    if config.q_lora_rank is None:  # 0.19 refuses a norm of what is not there
        attention.q_layernorm = IdentityOp
    attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear


def use_sdpa(model: Any) -> None:
    """Puts `SdpaAttention` instead of every core attention of a model without windows or sinks."""
    for module in [module for module in model.modules() if hasattr(module, "core_attention")]:
        latent = module.config.multi_latent_attention
        module.core_attention = SdpaAttention(
            module.config, module.layer_number, module.attn_mask_type, module.attention_type,
            softmax_scale=(module if latent else module.config).softmax_scale,
            pg_collection=module.pg_collection,
        )  # fmt: skip


def _lengths(packed_seq_params: Any) -> list[int]:
    """Positions of every sample of a pack on all ranks, padding included."""
    padded = packed_seq_params.cu_seqlens_q_padded
    ends = packed_seq_params.cu_seqlens_q if padded is None else padded
    return [length for length in ends.diff().tolist() if length]


def _hidden(
    length: int, *, rank: int, size: int, window: tuple[int, int] | None, device: torch.device
) -> torch.Tensor | None:
    """Which keys of a sample the queries of one rank do not see, bool [1, 1, queries, keys].

    None if the rank has the whole sample: the stock module's own mask.
    """
    if size == 1:
        return None
    held = torch.from_numpy(cp_layout.rank_positions(length, rank, size)).to(device)[:, None]
    keys = torch.arange(length, device=device)
    hidden = keys > held
    if window is not None:
        hidden |= keys < held - window[0]
    return hidden[None, None]


_SOFTMAX = {torch.softmax, torch.nn.functional.softmax}
_CASTS = {torch.Tensor.to, torch.Tensor.float, *_SOFTMAX}


class Float64Kept(TorchFunctionMode):
    """Makes casts of float64 to float32 do nothing.

    Args:
        is_sparse: whether masks in float32 are made in float64, too: DSAttention compares dtypes.
    """

    def __init__(self, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.is_sparse = is_sparse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_sparse and func.__name__ == "full" and kwargs.get("dtype") == torch.float32:
            return func(*args, **{**kwargs, "dtype": torch.float64})
        if func not in _CASTS:  # of nearly every call, attributes among them
            return func(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            # 0.17 casts logits so; the experts' biases, of one dimension, are float32 everywhere.
            is_cast = func is torch.Tensor.to and args[1:] == (torch.float32,) and args[0].dim() > 1
            if func is torch.Tensor.float or is_cast:
                return args[0]
            if func in _SOFTMAX and kwargs.get("dtype") == torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def keep_float64(module: Any) -> None:
    """Makes a router, or a layer, of a float64 model compute in float64.

    Megatron computes softmax and sigmoid of a router's logits in float32, for any
    `moe_router_dtype` (transformer/moe/moe_utils.py, `topk_routing_with_score_function` and
    `compute_routing_scores_for_aux_loss`), the decay of recurrent layers, and gates.
    """
    stock, is_sparse = module.forward, is_dsa(module.config)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with Float64Kept(is_sparse=is_sparse):
            return stock(*args, **kwargs)

    module.forward = forward
