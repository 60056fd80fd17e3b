"""Stand-ins for the GatedDeltaNet that slime and miles put into Megatron's layers.

Written for these tests; who calls whom, and with what, is as in slime_plugins/models of slime at
624b824a8 and miles_plugins/models of miles at 31f1ca961. In plain torch, in any dtype. Context
parallelism is as in miles: kernels get contiguous parts of a pack; here they gather all of it.
"""

import contextlib
import copy
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from megatron_prefix.features.recurrent import definition
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.platforms.linear_kernels import causal_conv1d
from megatron_prefix.lab.rl import packing
from megatron_prefix.tree import cp_layout
from tests.harness.steps import Contract

SIZES = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"


class Parts(NamedTuple):
    """As flash-linear-attention's context: each rank has a contiguous part of all sequences."""

    group: Any
    cu_seqlens: Tensor

    def whole(self, x: Tensor) -> Tensor:
        """[1, all positions, ...]; gradients are summed."""
        if len(x) > 1:
            raise ValueError("The batch size is expected to be 1 when using `cu_seqlens`.")
        return gather_from_sequence_parallel_region(x[0], group=self.group)[None]

    def own(self, x: Tensor) -> Tensor:
        """The reverse, without a sum."""
        return x.chunk(self.group.size(), 1)[self.group.rank()]


def build_gdn_cp_context(module: Any, cu_seqlens: Tensor, device: Any) -> Parts | None:
    """As miles'."""
    group = getattr(module, "cp_group", None)
    return None if group is None else Parts(group, cu_seqlens)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cp_context: Parts | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """As flash-linear-attention's."""
    if cp_context is None:
        return definition.chunk_gated_delta_rule(q, k, v, g, beta, **options)
    inputs = map(cp_context.whole, (q, k, v, g, beta))
    return cp_context.own(definition.chunk_gated_delta_rule(*inputs, **options)[0]), None


def _zigzag_to_packed_shard(x: Tensor, cu_seqlens: Tensor, group: Any, rank: int, size: int) -> Any:
    order = cp_layout.view_order(cu_seqlens.diff().tolist(), size)
    whole = gather_from_sequence_parallel_region(x, group=group)[torch.from_numpy(order)]
    return whole.chunk(size)[rank]


def _packed_shard_to_zigzag(x: Tensor, cu_seqlens: Tensor, group: Any, rank: int, size: int) -> Any:
    held = cp_layout.held_positions(cu_seqlens.diff().tolist(), rank, size)
    return gather_from_sequence_parallel_region(x, group=group)[torch.from_numpy(held)]


class ShortConvolution(nn.Conv1d):
    """As flash-linear-attention's: a depthwise convolution with SiLU, of packs, too."""

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, cp_context: Parts | None = None
    ) -> Any:
        whole = x if cp_context is None else cp_context.whole(x)
        weight = self.weight.squeeze(1)
        y, _ = causal_conv1d(whole, weight, self.bias, activation="silu", cu_seqlens=cu_seqlens)
        return y if cp_context is None else cp_context.own(y), None


class FusedRMSNormGated(nn.Module):
    """As flash-linear-attention's: a norm of its input times SiLU of the gate."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * F.silu(gate)


class OwnNet(nn.Module):
    """As Qwen3_5GatedDeltaNet, of [1, positions, hidden_size]: the rule is an attribute."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_v_heads, self.num_k_heads = (
            config.linear_num_value_heads,
            config.linear_num_key_heads,
        )
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.num_k_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.parts = [keys, keys, values]
        self.conv1d = ShortConvolution(sum(self.parts), config.linear_conv_kernel_dim)
        heads, whole = self.num_v_heads, sum(self.parts)
        for name, width in (("qkv", whole), ("z", values), ("b", heads), ("a", heads)):
            setattr(self, f"in_proj_{name}", nn.Linear(config.hidden_size, width, bias=False))
        self.dt_bias = nn.Parameter(torch.ones(self.num_v_heads))
        self.A_log = nn.Parameter(torch.zeros(self.num_v_heads))
        self.norm = FusedRMSNormGated(self.head_v_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)
        self.take_rule()

    def take_rule(self) -> None:
        self.chunk_gated_delta_rule = chunk_gated_delta_rule

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        context = build_gdn_cp_context(self, cu_seqlens, hidden_states.device)
        mixed, _ = self.conv1d(
            x=self.in_proj_qkv(hidden_states), cu_seqlens=cu_seqlens, cp_context=context
        )
        options = {"initial_state": None, "output_final_state": False}
        if context is not None:
            options = {"cp_context": context}
        out, _ = self.chunk_gated_delta_rule(
            *self.heads(mixed), **self.gates(hidden_states), **options,
            use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return self.close(out, hidden_states)

    def heads(self, mixed: Tensor) -> list[Tensor]:
        again = self.num_v_heads // self.num_k_heads
        query, key, value = mixed.split(self.parts, -1)
        query, key = (x.unflatten(-1, (-1, self.head_k_dim)) for x in (query, key))
        query, key = (x.repeat_interleave(again, 2) for x in (query, key))
        return [query, key, value.unflatten(-1, (-1, self.head_v_dim))]

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        """What the state decays by, and what is written to it."""
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        return {"g": decay, "beta": self.in_proj_b(x).sigmoid()}

    def close(self, out: Tensor, x: Tensor) -> Tensor:
        gate = self.in_proj_z(x).unflatten(-1, (-1, self.head_v_dim))
        return self.out_proj(self.norm(out, gate).flatten(2))


class NamedNet(OwnNet):
    """It calls the rule by keywords alone."""

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        mixed, _ = self.conv1d(x=self.in_proj_qkv(hidden_states), cu_seqlens=cu_seqlens)
        query, key, value = self.heads(mixed)
        out, _ = self.chunk_gated_delta_rule(
            q=query, k=key, v=value, **self.gates(hidden_states), use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return self.close(out, hidden_states)


class OlderNet(OwnNet):
    """As Qwen3NextGatedDeltaNet before slime's backends: the rule is a global name."""

    def take_rule(self) -> None:
        """It has none."""

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        mixed, _ = self.conv1d(x=self.in_proj_qkv(hidden_states), cu_seqlens=cu_seqlens)
        query, key, value = self.heads(mixed)
        gates = self.gates(hidden_states)
        out, _ = chunk_gated_delta_rule(
            query, key, value, g=gates["g"], beta=gates["beta"], initial_state=None,
            output_final_state=False, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return self.close(out, hidden_states)


class HuggingfaceAttention(MegatronModule):
    """The part that slime's and miles' Hugging Face modules have in common."""

    hybrid_cp = False

    def __init__(self, args, config, layer_number, cp_comm_type="p2p", pg_collection=None):
        super().__init__(config=config)
        self.args, self.layer_number, self.hf_config = args, layer_number, args.hf_config

    def forward(self, hidden_states, attention_mask, packed_seq_params=None, **_):
        group = parallel_state.get_tensor_model_parallel_group()
        if self.args.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=group
            )
        parts = parallel_state.get_context_parallel_group()
        given = packed_seq_params.cu_seqlens_q, parts, parts.rank(), parts.size()
        assert hidden_states.shape[0] * parts.size() == packed_seq_params.cu_seqlens_q[-1]
        if self.hybrid_cp:
            hidden_states = _zigzag_to_packed_shard(hidden_states, *given)
        output = self.hf_forward(hidden_states.permute(1, 0, 2), packed_seq_params)
        output = output.permute(1, 0, 2)
        if self.hybrid_cp:
            output = _packed_shard_to_zigzag(output, *given)
        if self.args.sequence_parallel:
            output = scatter_to_sequence_parallel_region(output, group=group)
        return output, None


class Attention(HuggingfaceAttention):
    """The self-attention of a layer."""

    def __init__(self, args, config, layer_number, name=None, **options):
        super().__init__(args, config, layer_number, **options)
        self.linear_attn = args.net(self.hf_config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=1e-6)

    def hf_forward(self, hidden_states: Tensor, packed_seq_params: Any) -> Tensor:
        hidden_states = self.input_layernorm(hidden_states)
        return self.linear_attn(
            hidden_states=hidden_states, cu_seqlens=packed_seq_params.cu_seqlens_q
        )


NETS = {"attribute": OwnNet, "global": OlderNet}
NAMED = "keywords"
_NETS = {**NETS, NAMED: NamedNet}


@contextlib.contextmanager
def own_layers(types, net="attribute", sequence_parallel=False, attention=Attention, **given):
    """GPTModels that are built meanwhile have such layers, without a norm in front of them."""
    stock = gpt_model.GPTModel

    def with_own(config: Any, block: Any, vp_stage: int | None = None, **options: Any) -> Any:
        hf_config = Namespace(hidden_size=config.hidden_size, layer_types=[*types], **SIZES)
        args = Namespace(
            sequence_parallel=sequence_parallel, hf_config=hf_config, net=_NETS[net], **given
        )
        block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
        start = get_transformer_layer_offset(config, vp_stage=vp_stage)
        for kind, layer in zip(types[start:], block.layer_specs, strict=False):
            if kind == LINEAR:
                own = ModuleSpec(module=attention, params={"args": args})
                layer.submodules.self_attention = own
                layer.submodules.input_layernorm = IdentityOp
        model = stock(config, block, vp_stage=vp_stage, **options)
        if config.context_parallel_size > 1:
            _pass_states(model)
        return model

    with mock.patch.object(gpt_model, "GPTModel", with_own):
        yield


def _pass_states(model: Any) -> None:
    """As miles does before its first step."""
    for module in model.modules():
        if isinstance(module, HuggingfaceAttention):
            module.hybrid_cp = True
            module.linear_attn.cp_group = parallel_state.get_context_parallel_group()


def own_model(types: Sequence[str] = (LINEAR, FULL), net: str = "attribute", **options: Any) -> Any:
    """The one chunk of a small model with such layers, in fp64; equal arguments, equal weights."""
    spec = resolve("tiny-llama", num_layers=len(types)).with_vocab(64)
    with own_layers(types, net):
        return build_model(spec, **{"dtype": torch.float64, **options})[0]


class Packed(Contract):
    """A trainer that packs: its layers take nothing else."""

    def step(self, data_iterator: Iterator[Any], model: Any) -> Any:
        batch = next(data_iterator)
        output = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=packing.packed_seq_params(batch, torch.device("cpu")),
        )  # fmt: skip
        return output, self.loss_func(batch)
