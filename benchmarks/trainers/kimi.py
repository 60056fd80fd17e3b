"""Stand-ins for Kimi K3's layers, and for what they take from other packages.

Written for tests; who calls whom, and with what, is as in megatron.bridge.models.kimi of
Megatron-Bridge at 067f987df and in miles_plugins.models.kimi_k3 of miles at ca9238d33.
"""

import contextlib
import copy
import itertools
import sys
import types
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_model
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    mappings,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from torch import nn

from megatron_prefix.features.recurrent.definition import l2norm
from tests.harness import own_delta
from tests.harness.own_delta import build_gdn_cp_context
from tests.harness.quantised import quantised
from tests.oracle.attention import CausalAttention

zigzag_to_packed_shard = own_delta._zigzag_to_packed_shard
packed_shard_to_zigzag = own_delta._packed_shard_to_zigzag
HEADS, WIDTH, BLOCK = 4, 6, 2


def chunk_kda(
    q, k, v, g, beta, *, A_log=None, dt_bias=None, lower_bound=None,  # noqa: N803
    initial_state=None, output_final_state=False, cu_seqlens=None, cp_context=None,
    use_gate_in_kernel=False, use_qk_l2norm_in_kernel=False, transpose_state_layout=False,
    safe_gate=False,
):  # fmt: skip
    """As flash-linear-attention's: S [values, keys] decays by a number for each of a key's;
    S = S + beta (v - S k) k'; out = S q."""
    if cp_context is not None:
        q, k, v, g, beta = map(cp_context.whole, (q, k, v, g, beta))
        cu_seqlens = cp_context.cu_seqlens
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if use_gate_in_kernel:
        rate = A_log.exp()[:, None] * (g + dt_bias.view(g.shape[2:]))
        g = lower_bound * rate.sigmoid()
    q, decay = q * q.shape[-1] ** -0.5, g.exp()
    if initial_state is not None and not transpose_state_layout:
        initial_state = initial_state.mT
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    whole = q.new_zeros(len(q), q.shape[2], v.shape[3], k.shape[3])
    outs, finals = [], []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        state = whole if initial_state is None else initial_state[number : number + len(q)]
        for at in range(start, stop):
            key, state = k[:, at, :, None], state * decay[:, at, :, None]
            written = beta[:, at, :, None, None] * (v[:, at, ..., None] - state @ key.mT)
            state = state + written @ key
            outs.append((state @ q[:, at, ..., None]).squeeze(-1))
        finals.append(state)
    outs += [torch.zeros_like(outs[0])] * (q.shape[1] - bounds[-1])  # behind the last sequence
    out = torch.stack(outs, 1)
    out = out if cp_context is None else cp_context.own(out)
    final = torch.cat(finals)
    final = final if transpose_state_layout else final.mT
    return out, final if output_final_state else None


class ShortConvolution(own_delta.ShortConvolution):
    """As flash-linear-attention's, called with more."""

    def __init__(self, hidden_size, kernel_size, dtype=None, **_):
        super().__init__(hidden_size, kernel_size)
        self.to(dtype)

    def forward(self, x, output_final_state=False, cu_seqlens=None, cp_context=None):
        if cp_context is None and cu_seqlens is not None:
            cu_seqlens = torch.cat((cu_seqlens, cu_seqlens.new_tensor([x.shape[1]]))).unique()
        return super().forward(x, cu_seqlens=cu_seqlens, cp_context=cp_context)


class FusedRMSNormGated(nn.RMSNorm):
    """As flash-linear-attention's, with a sigmoid."""

    def __init__(self, hidden_size, eps, dtype=None, **_):
        super().__init__(hidden_size, eps=eps, dtype=dtype)

    def forward(self, x, gate):
        return super().forward(x) * gate.sigmoid()


class Duplicated(Linear):
    """As transformer-engine's TELinear, of Megatron's."""

    def __init__(self, *sizes, parallel_mode, **options):
        super().__init__(*sizes, **options)


def modules():
    """Those of flash-linear-attention, by name."""
    named = {
        "fla": {}, "fla.ops": {}, "fla.ops.kda": {"chunk_kda": chunk_kda},
        "fla.ops.cp": {"build_cp_context": lambda cu_seqlens, group, **_: own_delta.Parts(
            group, cu_seqlens)},
        "fla.modules": {
            "ShortConvolution": ShortConvolution, "FusedRMSNormGated": FusedRMSNormGated,
        },
        # What tunes a kernel, which is asked on GPUs of one kind alone.
        "fla.ops.kda.chunk_bwd": {"chunk_kda_bwd_kernel_wy_dqkg_fused": None},
        "fla.utils": {"IS_NVIDIA_HOPPER": False},
    }  # fmt: skip
    made = {name: types.ModuleType(name) for name in named}
    for name, module in made.items():
        vars(module).update(named[name])
    return made


def kda(*inputs, **given):
    from fla.ops.kda import chunk_kda

    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound")
    return chunk_kda(
        **dict(zip(names, inputs, strict=True)), **given, initial_state=None,
        output_final_state=False, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        transpose_state_layout=True,
    )[0]  # fmt: skip


class KimiK3Attention(MegatronModule):
    """Kimi Delta Attention, or latent attention; with context parallelism as in miles."""

    def __init__(self, config, layer_number, cp_comm_type=None, pg_collection=None, **_):
        super().__init__(config=config)
        self.pg_collection, self.cp_group = pg_collection, pg_collection.cp
        self.cp_size, self.is_kda = self.cp_group.size(), layer_number in config.kimi_kda_layers
        plain, ranks = copy.copy(config), pg_collection.tp.size()
        plain.sequence_parallel = False
        self.shared = {"config": plain, "init_method": config.init_method, "bias": False,
                       "skip_bias_add": False, "tp_group": pg_collection.tp}  # fmt: skip
        hidden, self.latents = config.hidden_size, [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        self.widths = config.qk_head_dim, config.v_head_dim
        if self.is_kda:
            own, self.local_num_heads = HEADS * WIDTH, HEADS // ranks
            self.head_dim, self.gate_lower_bound = WIDTH, -5.0
            for name in "qkvgf":
                setattr(self, f"{name}_proj", self.column(hidden, own))
            for name in "qkv":
                setattr(self, f"{name}_conv1d", ShortConvolution(own // ranks, 4))
            self.b_proj = self.column(hidden, HEADS)
            self.A_log = nn.Parameter(torch.zeros(self.local_num_heads))
            self.dt_bias = nn.Parameter(torch.zeros(own // ranks))
            self.o_norm = FusedRMSNormGated(WIDTH, config.layernorm_epsilon)
            mark(self.o_norm, config)
        else:
            heads, width = config.num_attention_heads, self.widths[0] + self.latents[1]
            own = heads * config.v_head_dim
            self.q_proj = self.column(hidden, heads * width)
            self.kv_a_proj = nn.Linear(hidden, sum(self.latents), bias=False)
            self.kv_b_proj = self.column(config.kv_lora_rank, heads * sum(self.widths))
            self.core_attention = CausalAttention(
                config=config, layer_number=layer_number, attn_mask_type=AttnMaskType.causal,
                attention_type="self", softmax_scale=width**-0.5, k_channels=width,
                v_channels=config.v_head_dim, pg_collection=pg_collection,
            )  # fmt: skip
        self.o_proj = RowParallelLinear(own, hidden, input_is_parallel=True, **self.shared)

    def column(self, *sizes):
        return ColumnParallelLinear(*sizes, gather_output=False, **self.shared)

    def _cp_global_cu_seqlens(self, x, packed):
        if packed is not None:
            return packed.cu_seqlens_q
        return torch.tensor([0, len(x) * self.cp_size], dtype=torch.int32)

    def _forward_kda(self, hidden_states, packed):
        return self._kda_core(hidden_states, packed)

    def _kda_core(self, hidden_states, packed):
        x, context = hidden_states.transpose(0, 1), None
        bounds = None if packed is None else packed.cu_seqlens_q
        if self.cp_size > 1:
            bounds = self._cp_global_cu_seqlens(hidden_states, packed)
            context = build_gdn_cp_context(self, bounds, x.device)
        given = {"cu_seqlens": bounds, "cp_context": context}
        parts = {name: getattr(self, f"{name}_proj")(x)[0] for name in "qkvgfb"}
        for name in "qkv":
            convolution = getattr(self, f"{name}_conv1d")
            parts[name], _ = convolution(x=parts[name], output_final_state=False, **given)
        beta = parts.pop("b").sigmoid()
        q, k, v, gate, g = (part.unflatten(-1, (-1, WIDTH)) for part in parts.values())
        out = kda(q, k, v, g, beta, self.A_log, self.dt_bias, self.gate_lower_bound, **given)
        return self.o_proj(self.o_norm(out, gate).flatten(2))[0].transpose(0, 1)

    def _forward_mla(self, x, packed):
        query = self.q_proj(x)[0].unflatten(-1, (-1, self.widths[0] + self.latents[1]))
        latents, extra = self.kv_a_proj(x).split(self.latents, -1)
        made = self.kv_b_proj(latents)[0].unflatten(-1, (-1, sum(self.widths)))
        plain, value = made.split(self.widths, -1)
        extra = mappings.copy_to_tensor_model_parallel_region(extra, group=self.pg_collection.tp)
        key = torch.cat((plain, extra.unsqueeze(-2).expand(*plain.shape[:-1], -1)), -1)
        given = [query, key, value.contiguous()]
        given = given if packed is None else [one.squeeze(1) for one in given]
        causal = {"packed_seq_params": packed, "attn_mask_type": AttnMaskType.causal}
        out = self.core_attention(*given, None, **causal)
        return self.o_proj(out.reshape(len(out), -1, out.shape[-1]))[0]

    def forward(self, hidden_states, attention_mask=None, packed_seq_params=None, **_):
        x, packed, group = hidden_states, packed_seq_params, self.pg_collection.tp
        if self.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, False, group)
        if moved := self.is_kda and self.cp_size > 1:
            bounds = self._cp_global_cu_seqlens(x, packed)
            place = bounds, self.cp_group, self.cp_group.rank(), self.cp_size
            x = zigzag_to_packed_shard(x, *place)
        x = self._forward_kda(x, packed) if self.is_kda else self._forward_mla(x, packed)
        x = packed_shard_to_zigzag(x, *place) if moved else x
        if self.config.sequence_parallel:
            x = scatter_to_sequence_parallel_region(x, group=group)
        return x, None


KimiK3Attention.__module__ = "miles_plugins.models.kimi_k3.layers"


class KimiK3TransformerLayer(TransformerLayer):
    """Attention residuals: what a layer and its MLP are given is mixed of what others have left."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.mixes = nn.ParameterList(torch.ones(self.config.hidden_size) for _ in range(2))
        mark(self.mixes, self.config)
        ranks = range(self.config.pipeline_model_parallel_size)
        starts = {get_transformer_layer_offset(self.config, None, rank) for rank in ranks}
        self.starts, self.ends = self.layer_number - 1 in starts - {0}, self.layer_number in starts

    def forward(self, x=None, *_, hidden_states=None, context=None, packed_seq_params=None, **__):
        x, number = hidden_states if x is None else x, self.layer_number - 1
        if (bank := context) is None:
            rows = -(-number // BLOCK) if self.starts else 0
            x, bank = x.unflatten(-1, (1 + rows, -1)).split((1, rows), -2)
            x = x.squeeze(-2)
        inputs = mixed(x, bank, self.mixes[0])
        if number % BLOCK == 0:
            bank, x = torch.cat((bank, x.unsqueeze(-2)), -2), 0
        packed = {"packed_seq_params": packed_seq_params}
        x = x + self.self_attention(self.input_layernorm(inputs), **packed)[0]
        x = x + self.mlp(self.pre_mlp_layernorm(mixed(x, bank, self.mixes[1])))[0]
        return (torch.cat((x, bank.flatten(-2)), -1) if self.ends else x), bank


def mixed(x, bank, weight):
    rows = torch.cat((bank, x.unsqueeze(-2)), -2)
    scores = (F.rms_norm(rows, rows.shape[-1:]) * weight).sum(-1, keepdim=True)
    return (scores.softmax(-2) * rows).sum(-2)


def mark(module, config):
    """Gradients of its parameters are summed over tensor-parallel ranks."""
    for parameter in module.parameters():
        parameter.sum_gradients_across_tp_domain = True
        parameter.sequence_parallel = config.sequence_parallel


def with_states(model):
    """States decay slowly, and convolutions leave enough to see them."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data.sub_(3)
        elif "conv1d" in name:
            parameter.data.mul_(0.3 / parameter.std())


@contextlib.contextmanager
def own_layers(attention=KimiK3Attention, layer=KimiK3TransformerLayer, kda=(1, 3), **fields):
    """GPTModels that are built meanwhile have such layers; `kda`: those with Kimi Delta Attention,
    counted from 1."""
    stock = gpt_model.GPTModel

    def with_own(config, block, **options):
        vars(config).update(
            kimi_kda_layers=kda, kimi_linear_num_heads=HEADS, kimi_linear_head_dim=WIDTH,
            kimi_linear_conv_kernel_size=4, kimi_kda_gate_lower_bound=-5.0,
            kimi_attn_res_block_size=BLOCK, **fields,
        )  # fmt: skip
        block.layer_specs = [copy.deepcopy(one) for one in block.layer_specs]
        for one in block.layer_specs:
            one.module, one.submodules.self_attention = layer, ModuleSpec(module=attention)
        return stock(config, block, **{**options, "position_embedding_type": "none"})

    kernels = mock.patch.dict(sys.modules, modules())
    built = mock.patch.object(gpt_model, "GPTModel", with_own)
    with kernels, built, quantised(with_states):
        yield
