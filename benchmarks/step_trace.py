"""Proves that a step of the schedule does the same in two checkouts: records it, and compares.

    python -m benchmarks.step_trace record OUT.json
    python -m benchmarks.step_trace record OUT.json --configs dense,cp2-wave
    python -m benchmarks.step_trace compare OLD.json NEW.json

`record` makes training steps of every small model and layout of `CASES` on the CPU, each rank a
process, and writes down one of them, mostly the second: every operation in its order with shapes,
strides, dtypes and numbers, collectives among them; what the host reads from tensors; bytes of
tensors; digests of losses, gradients and buffers.  `compare` wants all of it equal, bit by bit, and
prints the first difference of every config.  On a machine with CUDA only configs of one rank run,
in bfloat16, and launched kernels, peak memory and synchronisations are written down as well; not
every kernel of attention adds up in one order there, so record a checkout twice first, and see what
differs.

This file is copied into older checkouts as it is, so it is one file, it builds its models from
Megatron-Core itself, and of the package it uses little.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # Megatron wants it: imported once, not by every rank
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

VOCAB = 64
PACKAGE = "megatron_prefix"
OBJECTS = """all_gather_object broadcast_object_list gather_object scatter_object_list
send_object_list recv_object_list""".split()
HOST_READS = {"cpu", "item", "numpy", "tolist", "nonzero", "masked_select", "unique"}
HOST_READS |= {"__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"}
WAITS = {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique2"}
WAITS |= {"aten.equal", "aten.unique_dim", "aten.unique_consecutive", "aten.is_nonzero"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step.

    Attributes:
        kind: of model: "dense", "experts", "delta" (GatedDeltaNet and attention), "own delta" (a
            trainer's own GatedDeltaNet and attention), "mamba", "latent" (multi-latent attention),
            "sparse" (the same with DeepSeek's sparse attention), or "vision" (images in prompts).
        layout: tp, pp, vpp, cp, ep, dp and sequence_parallel, where they are not 1.
        options: fields of PrefixConfig.
        model: fields of TransformerConfig.
        branches: rollouts share a trained turn after the prompt: loss in inner spans.
        packed: samples lie one behind the other (THD), else one row each.
        logits: the model is called without labels, and the loss changes the logits in place.
        forward_only: no backward.
        overlaps: gradients are reduced during the backward.
        spread: rollouts of a prompt are spread over the data-parallel ranks.
        from_file: the plan of a step is written to a file, and read from it.
        step: number of the recorded step, from 1.
        ran: what the recorded step has to enter in the package, on one rank at least: files,
            folders or `file:function`, as prefixes, with "|" between the names that a thing has
            in different checkouts. Without it a feature may be dropped and all steps still agree.
    """

    kind: str = "dense"
    layout: Mapping[str, int] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    branches: bool = False
    packed: bool = False
    logits: bool = False
    forward_only: bool = False
    overlaps: bool = False
    spread: bool = False
    from_file: bool = False
    step: int = 2
    ran: tuple[str, ...] = ()

    @property
    def replays_routes(self) -> bool:
        """Whether the trainer says to which experts routers send every token."""
        return bool(self.model.get("moe_enable_routing_replay"))

    @property
    def measures(self) -> bool:
        """Whether times are measured that a step reads: in mode auto, and of messages across."""
        return self.spread or self.options.get("mode") == "auto"

    def size(self, name: str) -> int:
        """A size of the layout."""
        return self.layout.get(name, 1)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.size("tp") * self.size("pp") * self.size("cp") * self.size("dp")


BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
NO_AUX = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
BATCH = {  # losses of a microbatch, and those of the global batch
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [1e-2, 1e-2],
}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CHUNKS = {"chunk_tokens": 16}
WINDOWS = {"window_size": (8, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"}
ACROSS = {"across_ranks": "on"}
ACROSS_RAN = ("features/across/exchanges.py|features/across/",)
SPREAD: dict[str, Any] = {"options": ACROSS, "spread": True, "ran": ACROSS_RAN}
AUTO = {"mode": "auto", "min_speedup": 0.01}
GRAPHS = {"graph_tokens": 64}
GRAPHED = ("layers/graphs/pieces.py:run_backward|features/graphs/pieces.py:run_backward",)
IMAGES = ("run/read/given.py|features/vision/", "run/read/tower.py|features/vision/")
MEASURED = ("run/cost_meter.py:_learn|features/measure/cost_meter.py:_learn",)
JOINED = ("tree/payload_map.py:_pieces",)
REPLAY = {**BIAS, **NO_AUX, "moe_enable_routing_replay": True}
REPLAYED = ("moe/replay.py|features/replay/", "run/read/routes.py:read|features/replay/")
SPARSE = ("layers/blocks/sparse.py|features/dsa/",)
OWN_DELTA = ("layers/recurrent/own_delta.py|features/own_gdn/",)
ACTIVATION = ("layers/activation.py:drop|features/recompute_act/",)
GROUPED = {  # experts in one product, which wants bf16
    "bf16": True, "moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True,
    "recompute_granularity": "selective", "recompute_modules": ["moe_act"],
}  # fmt: skip
PLAN_FILE = ("plan/planfile.py:fitting|features/plan_files/",)
OVERLAP = ("run/execute/overlap.py|features/overlap/",)
MTP = ("run/execute/ahead.py|features/mtp/",)
HOST = ("offload/segment.py|features/host/",)
SHARDED = ("sidecar/sharded.py|features/context_parallel/sharded.py",)
GATHERED = ("sidecar/gathered.py|features/context_parallel/gathered.py",)
VERIFIED = ("run/verify/judge.py|features/verify/|watch/verify/",)
CASES: dict[str, Case] = {
    "dense": Case(),
    "dense-chunks": Case(options=CHUNKS),
    "dense-tree": Case(branches=True),
    "dense-packed": Case(branches=True, packed=True),
    "dense-logits": Case(logits=True),
    "dense-recomputed-layers": Case(branches=True, model=FULL),
    "experts": Case("experts", branches=True),
    "experts-bias": Case("experts", model={**BIAS, **NO_AUX}, packed=True),
    "hybrid-delta": Case("delta", branches=True, options=CHUNKS),
    "hybrid-mamba": Case("mamba", branches=True),
    "windows": Case(branches=True, options=CHUNKS, model=WINDOWS),
    "windows-host": Case(
        branches=True, options={"memory": "offload", "cache_host_layers": 2}, model=WINDOWS
    ),
    "latent": Case("latent", branches=True, options=CHUNKS),
    "latent-packed": Case("latent", packed=True, options={"memory": "recompute"}),
    "predicts-further": Case(branches=True, model={"mtp_num_layers": 1}, ran=MTP),
    "memory-recompute": Case(branches=True, options={**CHUNKS, "memory": "recompute"}),
    "memory-offload": Case(branches=True, options={**CHUNKS, "memory": "offload"}, ran=HOST),
    "memory-host-layers": Case(options={"memory": "offload", "cache_host_layers": 2}),
    "forward-only": Case(branches=True, packed=True, forward_only=True),
    "pp2": Case(branches=True, layout={"pp": 2}),
    "pp2-chunks": Case(options=CHUNKS, layout={"pp": 2}, packed=True),
    "pp2-mamba": Case("mamba", layout={"pp": 2}, options={"memory": "recompute"}),
    "vpp2": Case(branches=True, layout={"pp": 2, "vpp": 2}),
    "tp2-sp": Case(branches=True, layout={"tp": 2, "sequence_parallel": 1}),
    "cp2-wave": Case(
        options={**CHUNKS, "cp_reduce": "wave"}, layout={"cp": 2}, packed=True, ran=SHARDED
    ),
    "cp2-segment": Case(
        branches=True, options={"cp_reduce": "segment"}, layout={"cp": 2}, ran=GATHERED
    ),
    "cp2-windows": Case(branches=True, layout={"cp": 2}, options=CHUNKS, model=WINDOWS),
    "cp2-mamba": Case("mamba", branches=True, layout={"cp": 2}),
    "ep2": Case("experts", branches=True, layout={"ep": 2, "dp": 2}),
    "dp2-overlap": Case(branches=True, layout={"dp": 2}, overlaps=True, ran=OVERLAP),
    "pp2-ep2": Case("experts", layout={"pp": 2, "ep": 2, "dp": 2}),
    "pp2-ep2-batch": Case("experts", layout={"pp": 2, "ep": 2, "dp": 2}, model=BATCH),
    "images": Case("vision", branches=True, ran=IMAGES),
    "images-chunks": Case("vision", options={**CHUNKS, "memory": "recompute"}, ran=IMAGES),
    "pp2-images": Case("vision", branches=True, layout={"pp": 2}, ran=IMAGES),
    "dp2-across": Case(branches=True, layout={"dp": 2}, **SPREAD),
    "dp2-across-recompute": Case(
        layout={"dp": 2}, **SPREAD | {"options": {**ACROSS, **CHUNKS, "memory": "recompute"}}
    ),
    "dp2-across-delta": Case("delta", branches=True, layout={"dp": 2}, **SPREAD),
    "dp2-across-experts": Case(
        "experts", branches=True, layout={"dp": 2}, model={**BATCH, **BIAS}, **SPREAD
    ),
    "dp2-across-images": Case("vision", layout={"dp": 2}, **SPREAD),
    "dp2-across-predicts-further": Case(
        branches=True, layout={"dp": 2}, model={"mtp_num_layers": 1}, **SPREAD
    ),
    "pp2-dp2-across": Case(branches=True, layout={"pp": 2, "dp": 2}, **SPREAD),
    "graphs": Case(branches=True, options=GRAPHS, ran=GRAPHED),
    "graphs-recompute": Case(
        packed=True, options={**GRAPHS, **CHUNKS, "memory": "recompute"}, ran=GRAPHED
    ),
    "graphs-experts": Case("experts", options=GRAPHS, ran=GRAPHED),
    "fp8": Case(branches=True, model={"fp8": "hybrid", "fp8_recipe": "blockwise"}),
    "auto": Case(options=AUTO, step=5, ran=MEASURED),
    "auto-stock": Case(options={"mode": "auto", "min_speedup": 1e9}, step=5),
    "auto-graphs": Case(
        branches=True, options={**AUTO, "graph_tokens": "auto"}, step=8, ran=GRAPHED
    ),
    "pp2-auto": Case(branches=True, layout={"pp": 2}, options=AUTO, step=5, ran=MEASURED),
    "dp2-auto-across": Case(
        branches=True,
        layout={"dp": 2},
        spread=True,
        options=AUTO,
        step=5,
        ran=ACROSS_RAN + MEASURED,
    ),
    "replay": Case("experts", branches=True, model=REPLAY, ran=REPLAYED),
    "pp2-replay": Case("experts", packed=True, layout={"pp": 2}, model=REPLAY, ran=REPLAYED),
    "sparse": Case("sparse", branches=True, options=CHUNKS, ran=SPARSE),
    "own-delta": Case("own delta", branches=True, packed=True, options=CHUNKS, ran=OWN_DELTA),
    "recompute-act": Case(branches=True, options={"memory": "recompute_act"}, ran=ACTIVATION),
    "experts-moe-act": Case("experts", branches=True, model=GROUPED),
    "joined": Case(options={"min_gain": 4}, ran=JOINED),
    "joined-tree": Case(
        branches=True, packed=True, options={"min_gain": 4, "segment_tokens": 96}, ran=JOINED
    ),
    "plan-file": Case(branches=True, from_file=True, ran=PLAN_FILE),
    "pp2-plan-file": Case(packed=True, layout={"pp": 2}, from_file=True, ran=PLAN_FILE),
    "cp2-ep2": Case("experts", branches=True, layout={"cp": 2, "ep": 2}),
    "pp2-predicts-further": Case(
        branches=True, packed=True, layout={"pp": 2}, model={"mtp_num_layers": 1}, ran=MTP
    ),
    "cp2-offload": Case(branches=True, layout={"cp": 2}, options={"memory": "offload"}, ran=HOST),
    "pp2-offload": Case(
        packed=True, layout={"pp": 2}, options={**CHUNKS, "memory": "offload"}, ran=HOST
    ),
    "verify": Case(branches=True, options={"verify": 2}, ran=VERIFIED),
    "pp2-verify": Case("experts", layout={"pp": 2}, options={"verify": 2}, ran=VERIFIED),
}


# --- what differs between checkouts ---------------------------------------------------------------


def moved(*names: str) -> Any:
    """A module of the package by the first of its names that exists.

    What only the command line and tests need lies in the package itself in older checkouts, and in
    its folder `lab` in newer ones; there the CPU's part may have a shorter name. Give a feature's
    module all names that it has had.
    """
    for name in [f"{PACKAGE}.{folder}{name}" for name in names for folder in ("lab.", "")]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # of something else that it imports
    raise ModuleNotFoundError(f"{PACKAGE} has none of {', '.join(names)}")


def plan_text(plan: Any) -> str:
    """A plan as text that `plan_file` reads."""
    if hasattr(plan, "to_csv"):  # older checkouts
        return str(plan.to_csv())
    return str(moved("features.plan_files.table").to_csv(plan))


def cpu_platform() -> Any:
    """The module that lets Megatron run on the CPU."""
    return moved("platforms.cpu", "cpu")


@functools.cache
def in_package(path: str) -> str | None:
    """The path of a source file below the package's folder; None where it is elsewhere."""
    spec = importlib.util.find_spec(PACKAGE)
    [folder] = (spec and spec.submodule_search_locations) or [""]
    with contextlib.suppress(ValueError):
        return Path(path).relative_to(folder).as_posix()
    return None


# --- models, from Megatron-Core -------------------------------------------------------------------


def transformer_config(case: Case, dtype: torch.dtype) -> Any:
    """Megatron's configuration of a case: four small layers, nothing random, nothing fused."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    virtual: dict[str, Any] = {}
    if case.size("vpp") > 1:
        # With batch_p2p_comm, virtual stages over gloo give wrong gradients without an error.
        virtual = {"virtual_pipeline_model_parallel_size": case.size("vpp")}
        virtual |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    values: dict[str, Any] = dict(
        num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        ffn_hidden_size=96, normalization="RMSNorm", layernorm_epsilon=1e-6, qk_layernorm=True,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=case.size("tp"), pipeline_model_parallel_size=case.size("pp"),
        context_parallel_size=case.size("cp"), expert_model_parallel_size=case.size("ep"),
        sequence_parallel="sequence_parallel" in case.layout,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True, transformer_impl="local", masked_softmax_fusion=False,
        bias_activation_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        **virtual,
    )  # fmt: skip
    latent = case.kind in ("latent", "sparse")
    made = MLATransformerConfig if latent else TransformerConfig
    return made(**values | _OF_KIND[case.kind] | case.model)


_LATENT: dict[str, Any] = dict(
    multi_latent_attention=True, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16,
    qk_pos_emb_head_dim=8, v_head_dim=16, rope_type="rope", num_query_groups=4,
)  # fmt: skip
_OF_KIND: dict[str, dict[str, Any]] = {
    "dense": {},
    "own delta": {},
    "vision": {"mrope_section": [4, 2, 2]},
    "latent": _LATENT,
    "sparse": dict(  # with 16 heads no two scores of the indexer are equal
        _LATENT, experimental_attention_variant="dsa", dsa_indexer_n_heads=16,
        dsa_indexer_head_dim=16, dsa_indexer_topk=6, dsa_indexer_loss_coeff=0.0,
    ),
    "experts": dict(
        num_moe_experts=4, moe_ffn_hidden_size=32, moe_router_topk=2, moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2, moe_z_loss_coeff=1e-3,
    ),
    "delta": dict(
        experimental_attention_variant="gated_delta_net", linear_attention_freq=2,
        attention_output_gate=True, linear_conv_kernel_dim=4, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    ),
    "mamba": dict(
        is_hybrid_model=True, mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2,
        mamba_num_heads=8,
    ),
}  # fmt: skip
PATTERN = "M*-M"


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm, built as Megatron builds its norms; Megatron's own refuses sequence
    parallelism (transformer/torch_norm.py) or wants transformer-engine."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@functools.cache
def _attention() -> Any:
    """Megatron's local attention, which refuses context parallelism; the schedule replaces it."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            of_latents = {"k_channels", "v_channels"}
            given = {name: one for name, one in kwargs.items() if name not in of_latents}
            super().__init__(alone, *args, **given)

    return Attention


def _localized(submodules: Any) -> Any:
    """Puts the two modules above into the parts of a local layer."""
    submodules.input_layernorm = submodules.pre_mlp_layernorm = Norm
    attention = submodules.self_attention.submodules
    of_keys = "k_layernorm" if hasattr(attention, "k_layernorm") else "kv_layernorm"
    attention.q_layernorm = Norm
    setattr(attention, of_keys, Norm)
    attention.core_attention = _attention()
    return submodules


def _delta_net() -> Any:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear
    )
    return ModuleSpec(module=GatedDeltaNet, submodules=parts)


def _mixer(kind: str, config: Any, number: int) -> Any:
    """What mixes positions in a layer, counted from 1, instead of attention; None: attention."""
    if kind == "delta" and number % config.linear_attention_freq:
        return _delta_net()
    return _own_delta_net() if kind == "own delta" and number % 2 else None


def _gpt(kind: str, config: Any, vp_stage: int | None, options: dict[str, Any]) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # newer releases refuse local layers with it
    block = get_gpt_decoder_block_spec(
        plain, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_norm = Norm
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]  # one object
    first = get_transformer_layer_offset(config, vp_stage=vp_stage) + 1
    for number, layer in enumerate(block.layer_specs, first):
        _localized(layer.submodules)
        if kind == "sparse":
            layer.submodules.self_attention.submodules.core_attention = _sparse_attention()
        if (mixer := _mixer(kind, config, number)) is not None:
            layer.submodules.self_attention = mixer
            if kind == "own delta":  # it has a norm of its own
                layer.submodules.input_layernorm = IdentityOp
    ahead = None
    if config.mtp_num_layers:
        ahead = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
        for one in ahead.layer_specs if ahead else ():  # the last stage has it
            parts = one.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = Norm
    if kind == "vision":
        return _vision_model()(config, block, **options)
    return GPTModel(
        config, block, vp_stage=vp_stage, position_embedding_type="rope", mtp_block_spec=ahead,
        **options,
    )  # fmt: skip


def _sparse_attention() -> Any:
    """DeepSeek's sparse attention; every rank has all of its indexer."""
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec

    class Duplicated(Linear):
        def __init__(self, *sizes: int, parallel_mode: str, **options: Any) -> None:
            super().__init__(*sizes, **options)

    class LayerNorm(torch.nn.LayerNorm):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

    indexer = dsa.DSAIndexerSubmodules(
        linear_wq_b=Duplicated, linear_wk=Duplicated, k_norm=LayerNorm,
        linear_weights_proj=Duplicated,
    )  # fmt: skip
    parts = dsa.DSAttentionSubmodules(indexer=ModuleSpec(dsa.DSAIndexer, submodules=indexer))
    return ModuleSpec(dsa.DSAttention, submodules=parts)


class ShortConvolution(torch.nn.Conv1d):
    """flash-linear-attention's: a causal depthwise convolution with SiLU, of packs, too."""

    def forward(  # type: ignore[override]  # it returns a state, too
        self, x: Tensor, cu_seqlens: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """[1, positions, channels], and no state."""
        ends = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        before = self.kernel_size[0] - 1
        padded = [
            torch.nn.functional.pad(part.transpose(1, 2), (before, 0))
            for part in x.split(np.diff(ends).tolist(), 1)
        ]
        mixed = torch.cat([super(ShortConvolution, self).forward(part) for part in padded], 2)
        return torch.nn.functional.silu(mixed).transpose(1, 2), None


class OwnNet(torch.nn.Module):
    """slime's Qwen3_5GatedDeltaNet, small and without its gated norm."""

    in_proj_qkv: Any
    in_proj_b: Any
    in_proj_a: Any

    def __init__(self, config: Any) -> None:
        from megatron.core.ssm.gated_delta_net import chunk_gated_delta_rule

        super().__init__()
        self.num_k_heads = self.num_v_heads = 2
        self.head_k_dim = self.head_v_dim = 8
        hidden, dtype = config.hidden_size, config.params_dtype
        self.conv1d = ShortConvolution(48, 48, 4, groups=48, bias=False, dtype=dtype)
        for name, width in (("qkv", 48), ("b", 2), ("a", 2)):
            linear = torch.nn.Linear(hidden, width, bias=False, dtype=dtype)
            setattr(self, f"in_proj_{name}", linear)
        self.A_log = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        self.out_proj = torch.nn.Linear(16, hidden, bias=False, dtype=dtype)
        self.chunk_gated_delta_rule = chunk_gated_delta_rule

    def forward(self, hidden_states: Tensor, cu_seqlens: Any = None) -> Tensor:
        """[1, positions, hidden_size]"""
        mixed, _ = self.conv1d(x=self.in_proj_qkv(hidden_states), cu_seqlens=cu_seqlens)
        query, key, value = (part.unflatten(-1, (2, 8)) for part in mixed.split(16, -1))
        decay = -self.A_log.exp() * torch.nn.functional.softplus(self.in_proj_a(hidden_states))
        out, _ = self.chunk_gated_delta_rule(
            query, key, value, g=decay, beta=self.in_proj_b(hidden_states).sigmoid(),
            initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return self.out_proj(out.flatten(2))


def _own_delta_net() -> Any:
    """The self-attention that slime and miles put into a layer; they are recognised by the names
    of their classes, and by the names that `hf_forward` reads."""
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec

    class HuggingfaceAttention(MegatronModule):
        def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
            super().__init__(config=config)
            types = ["linear_attention", "full_attention"] * (config.num_layers // 2)
            self.layer_number = layer_number
            self.hf_config = argparse.Namespace(layer_types=types)

        def forward(self, hidden_states: Any, *_: Any, packed_seq_params: Any, **__: Any) -> Any:
            mixed = self.hf_forward(hidden_states.transpose(0, 1), packed_seq_params)
            return mixed.transpose(0, 1), None

    class Attention(HuggingfaceAttention):
        def __init__(self, config: Any, layer_number: int, **options: Any) -> None:
            super().__init__(config, layer_number, **options)
            self.linear_attn = OwnNet(config)
            self.input_layernorm = Norm(config, config.hidden_size)

        def hf_forward(self, hidden_states: Any, packed_seq_params: Any) -> Any:
            hidden_states = self.input_layernorm(hidden_states)
            return self.linear_attn(hidden_states, cu_seqlens=packed_seq_params.cu_seqlens_q)

    return ModuleSpec(module=Attention)


IMAGE, IMAGE_START, GRID, PATCH = 100, 5, (1, 4, 6), 5
"""The token of an image, where the images of prompts begin, [t, h, w] patches of an image, four to
a token, and numbers in a patch."""
IMAGE_TOKENS = GRID[1] * GRID[2] // 4


class Tower(torch.nn.Module):
    """Patches [n, PATCH] of images -> embeddings of their tokens; a token sees its own image."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4 * PATCH, 16, dtype=config.params_dtype)
        self.second = torch.nn.Linear(16, config.hidden_size, dtype=config.params_dtype)

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Any:
        """[tokens, hidden_size], and no rows for deeper layers."""
        rows = self.first(hidden_states.unflatten(0, (-1, 4)).flatten(1))
        parts = rows.split((grid_thw.prod(-1) // 4).tolist())
        return self.second(torch.cat([torch.tanh(part + part.mean(0)) for part in parts])), []


@functools.cache
def _vision_model() -> Any:
    """A vision-language model that is its own language model, recognised by its class's name."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_model import GPTModel

    class Qwen2_5_VLModel(GPTModel):  # noqa: N801
        def __init__(self, config: Any, block: Any, **options: Any) -> None:
            super().__init__(
                config, block, position_embedding_type="mrope",
                scatter_embedding_sequence_parallel=False, **options,
            )  # fmt: skip
            self.model_type = ModelType.encoder_or_decoder
            if self.pre_process:
                self.vision_model = Tower(config)

        @property
        def language_model(self) -> Any:
            return self

        def forward(
            self, input_ids: Any, position_ids: Any, attention_mask: Any, pixel_values: Any = None,
            image_grid_thw: Any = None, **named: Any,
        ) -> Any:  # fmt: skip
            rows = None
            if self.pre_process:
                rows = self.embedding(input_ids=input_ids, position_ids=None).clone()
                if pixel_values is not None:
                    seen, _ = self.vision_model(hidden_states=pixel_values, grid_thw=image_grid_thw)
                    mask = (input_ids == IMAGE).transpose(0, 1)[..., None]
                    rows = rows.masked_scatter(mask, seen)
            return super().forward(
                input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask,
                decoder_input=rows, **named,
            )  # fmt: skip

    Qwen2_5_VLModel.__module__ = "mcore_adapter.models.qwen2_5_vl.modeling_qwen2_5_vl"
    Qwen2_5_VLModel.__qualname__ = "Qwen2_5_VLModel"
    Tower.__module__ = "transformers.models.qwen3_vl.modeling_qwen3_vl"
    Tower.__qualname__ = "Qwen3VLVisionModel"
    return Qwen2_5_VLModel


def _mamba(config: Any, options: dict[str, Any]) -> Any:
    """Megatron's hybrid model of Mamba2, attention and MLPs, of local layers."""
    try:  # since 0.18; MambaModel is its old name
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Stock
    except ImportError:
        from megatron.core.models.mamba.mamba_model import MambaModel as Stock

    class Hybrid(Stock):
        def forward(  # as a GPTModel's; Megatron's has no loss_mask
            self, input_ids: Any, position_ids: Any, attention_mask: Any, decoder_input: Any = None,
            labels: Any = None, *, loss_mask: Any = None, **others: Any,
        ) -> Any:  # fmt: skip
            given = input_ids, position_ids, attention_mask, decoder_input, labels
            return super().forward(*given, **others)

    Hybrid.__module__ = Stock.__module__  # a stranger's own forward is refused
    name, pattern = "hybrid_override_pattern", PATTERN
    if "hybrid_layer_pattern" in inspect.signature(Stock.__init__).parameters:
        per_stage = len(PATTERN) // config.pipeline_model_parallel_size
        pieces = [PATTERN[n : n + per_stage] for n in range(0, len(PATTERN), per_stage)]
        name, pattern = "hybrid_layer_pattern", "|".join(pieces)
    return Hybrid(config, _stack(), position_embedding_type="none", **{name: pattern}, **options)


def _stack() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    class Stack(MambaStack):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **{**kwargs, "post_layer_norm": False})
            self.post_layer_norm = True
            if self.post_process:
                self.final_norm = Norm(config, config.hidden_size)

    stock = get_gpt_layer_local_spec(None, qk_layernorm=True, normalization="RMSNorm")
    layer = _localized(stock.submodules)

    def alone(module: Any, *kept: str) -> Any:
        parts = TransformerLayerSubmodules(**{name: getattr(layer, name) for name in kept})
        return ModuleSpec(module=module, submodules=parts)

    linears = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(**linears))
    mamba = MambaLayerSubmodules(norm=Norm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    parts = MambaStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
        attention_layer=alone(
            TransformerLayer, "input_layernorm", "self_attention", "self_attn_bda"
        ),
        mlp_layer=alone(MLPLayer, "pre_mlp_layernorm", "mlp", "mlp_bda"),
    )
    return ModuleSpec(module=Stack, submodules=parts)


def build(case: Case, device: torch.device) -> list[Any]:
    """This rank's model chunks in Megatron's DistributedDataParallel, ready for a schedule."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = transformer_config(case, dtype)
    stage, stages = parallel_state.get_pipeline_model_parallel_rank(), case.size("pp")
    chunks = []
    for number in range(case.size("vpp")):
        options = {
            "vocab_size": 128, "max_sequence_length": 1024,
            "pre_process": stage == 0 and number == 0,
            "post_process": stage == stages - 1 and number == case.size("vpp") - 1,
            "share_embeddings_and_output_weights": case.kind == "dense",
        }  # fmt: skip
        if case.kind == "mamba":
            model = _mamba(config, options)
        else:
            model = _gpt(case.kind, config, number if case.size("vpp") > 1 else None, options)
        _fill(model.to(device))
        model = Float16Module(config, model) if config.bf16 else model.to(dtype)
        ddp = DistributedDataParallelConfig(
            overlap_grad_reduce=case.overlaps, grad_reduce_in_fp32=config.bf16,
            bucket_size=20_000 if case.overlaps else None,
        )  # fmt: skip
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=number > 0))
    config.finalize_model_grads_func = finalize_model_grads
    if case.overlaps:
        config.no_sync_func = chunks[0].no_sync
    for chunk in chunks:
        chunk.train()
    return chunks


@torch.no_grad()
def _fill(model: Any) -> None:
    """Weights by name; those of which every rank has a part of its own by rank, too."""
    from megatron.core.tensor_parallel import (
        set_defaults_if_not_set_tensor_model_parallel_attributes,
    )

    for name, parameter in model.named_parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        apart = parameter.tensor_model_parallel or ".experts." in name
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"  # on the last stage
        key = f"{name} {dist.get_rank() if apart else 0}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        if parameter.ndim > 1:
            drawn *= 0.8 / parameter.shape[-1] ** 0.5
        else:
            drawn = 0.1 * drawn + (1.0 if "norm" in name else -3.0 if "A_log" in name else 0.0)
        parameter.copy_(drawn)


def unwrapped(chunk: Any) -> Any:
    """The language model inside Megatron's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


# --- a trainer ------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """Tokens int64 [positions + 1] and which of them are trained; pixels of an image, if it has
    any."""

    tokens: np.ndarray
    trained: np.ndarray
    pixels: Tensor | None = None


def rollouts(branches: bool, seed: int, per_prompt: int = 4) -> list[Rollout]:
    """Uneven rollouts of three prompts, in the order of a trainer."""
    draw = np.random.default_rng(seed)
    found = []
    for length in (37, 9, 22):
        prompt = draw.integers(0, VOCAB, length)
        turns = [draw.integers(0, VOCAB, 7) for _ in range(2)]
        for number in range(per_prompt):
            turn = turns[number % 2] if branches else turns[0][:0]
            answer = draw.integers(0, VOCAB, int(draw.integers(3, 14)))
            tokens = np.concatenate([prompt, turn, answer])
            found.append(Rollout(tokens, np.arange(len(tokens)) >= length))
    return found


def with_images(members: Sequence[Rollout], dtype: torch.dtype) -> list[Rollout]:
    """An image in every prompt that is long enough; the last rollout's of four has other pixels."""
    source = torch.Generator().manual_seed(3)
    changed = []
    for first in range(0, len(members), 4):
        images = [torch.randn(4 * IMAGE_TOKENS, PATCH, generator=source) for _ in range(2)]
        for number, member in enumerate(members[first : first + 4]):
            tokens, pixels = member.tokens.copy(), images[number // 3].to(dtype)
            if member.trained[: 2 * IMAGE_START + IMAGE_TOKENS].any():
                changed.append(member)
                continue
            tokens[IMAGE_START : IMAGE_START + IMAGE_TOKENS] = IMAGE
            changed.append(member._replace(tokens=tokens, pixels=pixels))
    return changed


def _image_positions(member: Rollout) -> np.ndarray:
    """[3, positions] of time, row and column, by which attention rotates; text counts on."""
    count = np.arange(len(member.tokens) - 1)
    if member.pixels is None:
        return np.stack([count] * 3)
    end, width = IMAGE_START + IMAGE_TOKENS, GRID[2] // 2
    after = count - end + IMAGE_START + width
    rows, columns = np.divmod(count - IMAGE_START, width)
    inside = (count >= IMAGE_START) & (count < end)
    axes = (np.where(inside, axis + IMAGE_START, count) for axis in (0, rows, columns))
    return np.stack([np.where(count >= end, after, axis) for axis in axes])


def _routes(member: Rollout, number: int, config: Any) -> np.ndarray:
    """Experts [positions, layers, topk] by token and position; every fourth rollout's part from
    the others' inside the prompt."""
    tokens, place = member.tokens[:-1, None], np.arange(len(member.tokens) - 1)[:, None]
    layers, num = np.arange(config.num_layers)[None], config.num_moe_experts
    parts = (number % 4 == 3) & (place >= 6) & (layers == 1)
    first = (tokens + place * (layers + 1) + parts) % num
    shift = 1 + place % (num - 1)
    choices = [(first + rank * shift) % num for rank in range(config.moe_router_topk)]
    return np.stack(choices, 2)


class Trainer:
    """Microbatches of one rank, and the forward step over them."""

    def __init__(self, case: Case, device: torch.device, config: Any) -> None:
        from megatron.core import parallel_state

        self.case, self.device, self.config = case, device, config
        multiple = 2 * case.size("cp") if case.size("cp") > 1 else 1
        multiple *= case.size("tp")
        cp_rank = parallel_state.get_context_parallel_rank()
        rank, ranks = parallel_state.get_data_parallel_rank(), case.size("dp")
        if case.spread:
            members = rollouts(case.branches, 0, 4 * ranks)
            members = [member for n, member in enumerate(members) if n // 2 % ranks == rank]
        else:
            members = rollouts(case.branches, rank)
        if case.kind == "vision":
            members = with_images(members, config.params_dtype)
        sizes = (1, 2, 1, 2, 3, 3) if case.packed else (1,) * 12
        some = iter(members)
        self.batches = [
            self._batch([next(some) for _ in range(size)], number, multiple, cp_rank)
            for number, size in enumerate(sizes)
        ]

    def _batch(self, members: list[Any], number: int, multiple: int, cp_rank: int) -> Any:
        columns: dict[str, list[np.ndarray]] = {"tokens": [], "labels": [], "mask": []}
        lengths = []
        for tokens, trained, _ in members:
            pad = -(len(tokens) - 1) % multiple
            lengths.append(len(tokens) - 1 + pad)
            held = _zigzag(lengths[-1], cp_rank, self.case.size("cp"))
            columns["tokens"].append(np.pad(tokens[:-1], (0, pad))[held])
            columns["labels"].append(np.pad(tokens[1:], (0, pad))[held])
            columns["mask"].append(np.pad(trained[1:].astype(np.float32), (0, pad))[held])
        batch: dict[str, Any] = {
            name: torch.from_numpy(np.concatenate(rows)[None]).to(self.device)
            for name, rows in columns.items()
        }
        draw = torch.Generator().manual_seed(number)
        weight = torch.randn(batch["tokens"].shape, generator=draw)
        ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=self.device)
        batch |= {"weight": weight.to(self.device), "ends": ends, "longest": max(lengths)}
        if self.case.kind == "vision":
            batch["images"] = self._images(members)
        if self.case.replays_routes:
            routes = [_routes(member, number, self.config) for member in members]
            batch["routes"] = torch.from_numpy(np.concatenate(routes)).to(self.device)
        return batch

    def _images(self, members: Sequence[Rollout]) -> dict[str, Any]:
        """What a vision-language model is called with besides tokens."""
        places = np.concatenate([_image_positions(member) for member in members], 1)[:, None]
        pixels = [member.pixels.clone() for member in members if member.pixels is not None]
        images: dict[str, Any] = {}
        if pixels:
            images["pixel_values"] = torch.cat(pixels).to(self.device)
            images["image_grid_thw"] = torch.tensor([GRID] * len(pixels), device=self.device)
        return images | {"position_ids": torch.from_numpy(places).to(self.device)}

    def step(self, iterator: Iterator[Any], model: Any) -> Any:
        """A `forward_step_func`."""
        from megatron.core.packed_seq_params import PackedSeqParams

        batch, given = next(iterator), {}
        if self.case.packed:
            given["packed_seq_params"] = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=batch["ends"], cu_seqlens_kv=batch["ends"],
                max_seqlen_q=batch["longest"], max_seqlen_kv=batch["longest"],
            )  # fmt: skip
        if not self.case.logits:
            given["labels"] = batch["labels"]
        if self.case.replays_routes:
            for layer in unwrapped(model).decoder.layers:
                router = layer.mlp.router
                rows = batch["routes"][:, router.layer_number - 1]
                router.router_replay.set_target_indices(rows)
        if self.case.spread:  # the first step runs as Megatron's
            count = torch.arange(batch["tokens"].shape[1], device=self.device)[None]
            given["position_ids"] = count
        given = {"position_ids": None, "attention_mask": None} | given | batch.get("images", {})
        output = model(batch["tokens"], loss_mask=batch["mask"], **given)
        return output, functools.partial(self._loss, batch)

    def _loss(self, batch: Any, output: Tensor) -> Any:
        nll = output
        if self.case.logits:
            output.div_(0.7)  # as trainers apply a temperature
            nll = -output.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
        nll = nll * batch["mask"]
        return (nll * batch["weight"]).sum(), batch["mask"].sum().int(), {"nll": nll.detach()}

    def call(self, schedule: Callable[..., Any], chunks: list[Any]) -> Any:
        """One step of the schedule; gradients must be zero before."""
        iterators = [iter(self.batches) for _ in chunks]
        return schedule(
            forward_step_func=self.step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(self.batches),
            seq_length=64, micro_batch_size=1, forward_only=self.case.forward_only,
        )  # fmt: skip


def _zigzag(length: int, rank: int, size: int) -> np.ndarray:
    """Positions that a context-parallel rank holds, as Megatron cuts sequences."""
    parts = np.arange(length).reshape(2 * size, -1) if size > 1 else np.arange(length)[None]
    return np.concatenate([parts[rank], parts[-1 - rank]]) if size > 1 else parts[0]


def prepared(
    case: Case, device: torch.device, folder: str
) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Model, trainer and schedule of this rank: what zeroes gradients, and what makes a step.

    Args:
        case: what to make.
        device: of the model.
        folder: for files of this rank's.
    """
    import megatron_prefix

    chunks = build(case, device)
    trainer = Trainer(case, device, unwrapped(chunks[0]).config)
    options = {"segment_tokens": 64, "min_gain": 0, **case.options}

    def schedule_with(**more: Any) -> Any:
        config = megatron_prefix.PrefixConfig(**options, **more)
        return megatron_prefix.get_forward_backward_func(prefix_config=config)

    def zero() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()

    if case.replays_routes:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    schedule = schedule_with()
    if case.from_file:
        trainer.call(schedule, chunks)
        path = Path(folder, f"plan{dist.get_rank()}.csv")
        path.write_text(plan_text(schedule.report.plan), encoding="utf-8")
        schedule = schedule_with(plan_file=str(path))

    def step() -> Any:
        return trainer.call(schedule, chunks)

    step.chunks = chunks  # type: ignore[attr-defined]
    return zero, step


# --- stand-ins for clocks and GPUs ----------------------------------------------------------------


class Ticks(TorchDispatchMode):
    """A clock: every operation takes a microsecond."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and counts it."""
        self.num += 1
        return func(*args, **(kwargs or {}))

    def seconds(self) -> float:
        """Instead of `time.perf_counter`."""
        return 1e-6 * self.num


class Launches(TorchDispatchMode):
    """A CUDA graph on the CPU: operations are noted, and run again on the same tensors.

    Python does not run again, and what a capture has written is as before it.
    """

    def __init__(self, _: Any) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._new: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and notes it."""
        inputs = {one.untyped_storage()._cdata for one in _tensors([args, kwargs])}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        result = func(*args, **(kwargs or {}))
        outputs = [*_tensors(result)]
        self._new |= {one.untyped_storage()._cdata for one in outputs} - inputs
        self._calls.append((func, args, kwargs or {}, outputs))
        return result

    def _keep(self, tensor: Tensor) -> None:
        """A copy of what a capture overwrites, but of what it has made."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._new | self._before.keys():
            with torch.utils._python_dispatch._disable_current_modes():
                whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
                self._before[storage._cdata] = whole, whole.clone()

    def begin(self) -> None:
        """Begins a capture."""
        self.__enter__()

    def end(self) -> None:
        """Ends it."""
        self.__exit__(None, None, None)
        for whole, before in self._before.values():
            whole.copy_(before)

    abandon = end

    def replay(self) -> None:
        """Runs everything again."""
        with torch.no_grad():
            for func, args, kwargs, outputs in self._calls:
                for old, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)


@contextlib.contextmanager
def _graphs_on_the_cpu() -> Iterator[None]:
    graphs = moved("features.graphs.cuda", "device.graphs")

    class Graph(Launches):
        captured = graphs.Graph.captured

    stand_ins: dict[str, Any] = {
        "Graph": Graph, "why_not": lambda *_, **__: "", "pool": lambda: None,
        "apart": contextlib.nullcontext, "settle": lambda: None, "recover": lambda: None,
    }  # fmt: skip
    with mock.patch.multiple(graphs, **stand_ins):
        yield


class _Rounded(torch.autograd.Function):
    """A product of rows and weights in e4m3, with a scale for every 128 numbers of a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return _in_blocks(x) @ _in_blocks(weight).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return gradient @ _in_blocks(weight), rows.t() @ x.flatten(0, -2)


def _in_blocks(x: Tensor) -> Tensor:
    """[..., features], rounded to e4m3; scales are powers of two."""
    parts = []
    for part in x.split(128, -1):
        largest = part.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        scale = torch.exp2(torch.floor(torch.log2(448.0 / largest)))
        parts.append((part * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale)
    return torch.cat(parts, -1)


@contextlib.contextmanager
def _fp8_without_engine() -> Iterator[None]:
    """Linear layers of decoders round as transformer-engine's do by its blockwise recipe, and
    take as many rows as these: multiples of 16."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import transformer_block

    name = "linear_with_grad_accumulation_and_async_allreduce"
    stock = getattr(layers, name)

    def linear(input: Tensor, weight: Tensor, bias: Any, *rest: Any, **more: Any) -> Any:
        if weight.shape[0] == 128 or bias is not None:  # the output layer
            return stock(input, weight, bias, *rest, **more)
        if input.shape[:-1].numel() % 16:
            raise ValueError(f"a product in FP8 of {list(input.shape)}: rows come in 16s")
        return _Rounded.apply(input, weight)

    def context(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    linear.warned = True  # type: ignore[attr-defined]
    with (
        mock.patch.object(layers, name, linear),
        mock.patch.object(transformer_block, "get_fp8_context", context),
    ):
        yield


@contextlib.contextmanager
def _grouped_products() -> Iterator[None]:
    """grouped_gemm's products of the rows of every expert."""
    from megatron.core.transformer.moe import grouped_gemm_util

    def products(rows: Tensor, weights: Tensor, sizes: Tensor, trans_b: bool) -> Tensor:
        parts = zip(rows.split(sizes.tolist()), weights, strict=True)
        return torch.cat([part @ (weight.t() if trans_b else weight) for part, weight in parts])

    operations = argparse.Namespace(gmm=products)
    with mock.patch.multiple(grouped_gemm_util, grouped_gemm=operations, ops=operations):
        yield


@contextlib.contextmanager
def _hadamard() -> Iterator[None]:
    """Megatron's indexers rotate without fast-hadamard-transform, in any dtype."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    def rotated(x: Tensor) -> Tensor:
        matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
        while len(matrix) < x.shape[-1]:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return x @ (matrix * x.shape[-1] ** -0.5)

    with mock.patch.object(dsa, "rotate_activation", rotated):
        yield


@contextlib.contextmanager
def stand_ins(case: Case) -> Iterator[None]:
    """What takes the place of clocks, of graphs and of kernels in all steps of a case."""
    with contextlib.ExitStack() as stack:
        if case.measures:
            clock = stack.enter_context(Ticks())
            stack.enter_context(mock.patch.object(time, "perf_counter", clock.seconds))
        if "graph_tokens" in case.options and not torch.cuda.is_available():
            stack.enter_context(_graphs_on_the_cpu())
        if "fp8" in case.model:
            stack.enter_context(_fp8_without_engine())
        if "moe_grouped_gemm" in case.model:
            stack.enter_context(_grouped_products())
        if case.kind == "sparse":
            stack.enter_context(_hadamard())
        yield


# --- what a step passes through -------------------------------------------------------------------

CPU_FILES = ("cpu.py", "linear_kernels.py")
"""Files of functions that take the place of CUDA's on the CPU only."""

Entered = set[tuple[str, int, str]]
"""Functions: file below the package, line, and name."""


@contextlib.contextmanager
def profiled(entered: Entered) -> Iterator[None]:
    """Notes every Python function of the package that is entered.

    Greenlets share the profile function of their thread (greenlet keeps traces and frames apart,
    and not this), so suspended forward steps count; a backward on a GPU has a thread of its own.
    """
    codes: set[Any] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in codes:
            return
        codes.add(code)
        path = in_package(code.co_filename)
        if path is None or Path(path).name in CPU_FILES or code.co_name.startswith("<"):
            return
        entered.add((path, code.co_firstlineno, code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def not_entered(case: Case, functions: Iterable[str]) -> list[str]:
    """What of `Case.ran` is no prefix of any `file:function`."""
    paths = {*functions}
    return [
        names
        for names in case.ran
        if not any(path.startswith(tuple(names.split("|"))) for path in paths)
    ]


# --- recording ------------------------------------------------------------------------------------


class Storages:
    """Counts bytes of storages from the operation that makes them to their end."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        self.live = self.peak = 0

    def see(self, tensor: Tensor, made: bool) -> None:
        """Tells of a tensor of an operation; only what an operation `made` is counted."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # it has none
            return
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if made else 0

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


class Operations(TorchDispatchMode):
    """Writes down every operation, with its place in the package, and counts bytes.

    Attributes:
        lines: what was run.
        places: the innermost lines of the package that ran it.
        waits: operations for which the host waits on a GPU, by name.
        storages: counts bytes.
        noting: off while Python objects are sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.places: list[str] = []
        self.waits: collections.Counter[str] = collections.Counter()
        self.storages = Storages()
        self.noting = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation and notes it."""
        kwargs = kwargs or {}
        if not self.noting:
            return func(*args, **kwargs)
        for tensor in _tensors([args, kwargs]):
            self.storages.see(tensor, made=False)
        given = ", ".join([*map(shown, args), *(f"{k}={shown(v)}" for k, v in kwargs.items())])
        found = func(*args, **kwargs)
        for tensor in _tensors(found):
            self.storages.see(tensor, made=True)
        view = "view " if getattr(func, "is_view", False) else ""
        self.note(f"{view}{func}({given}) -> {shown(found)}")
        name = func._schema.name.replace("::", ".")
        masked = name in ("aten.index", "aten.index_put_") and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if name in WAITS or masked or _comes_to_host(name, args, found):
            self.waits[name] += 1
        return found

    def note(self, line: str) -> None:
        """Adds a line."""
        if not self.noting:
            return
        self.lines.append(line)
        self.places.append(_place())


def _comes_to_host(name: str, args: Sequence[Any], found: Any) -> bool:
    """Whether the host waits for a copy from the device."""
    if name not in ("aten._to_copy", "aten.copy_", "aten.copy"):
        return False
    sources = [one for one in _tensors(args) if one.device.type != "cpu"]
    return bool(sources) and any(one.device.type == "cpu" for one in _tensors(found))


class HostReads(TorchFunctionMode):
    """Counts calls by which the host reads tensors: on the CPU many of them run no operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch and counts it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # By name: `.to(device)` of a batch is no reading where the device is the CPU.
        goes = name == "to" and "cpu" in [
            one for one in (*args[1:], *kwargs.values()) if type(one) is str
        ]
        if name in HOST_READS or goes:
            self.counts[resolve_name(func) or name] += 1
        return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def shown(value: Any) -> str:
    """An argument or result of an operation; no address, nothing of the checkout."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        where = "" if value.device.type == "cpu" else f"@{value.device.type}"
        strides = tuple(value.stride()) if value.layout == torch.strided else value.layout
        return f"{dtype}{where}{list(value.shape)}{strides}".replace(" ", "")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.ScriptObject):
        with contextlib.suppress(RuntimeError, TypeError):
            return f"group {dist.get_process_group_ranks(dist.ProcessGroup.unbox(value))}"
    return type(value).__name__


def _place() -> str:
    """The innermost line of the package on the stack; empty in a backward that Python began not."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if (inside := in_package(frame.f_code.co_filename)) is not None:
            return f"{inside}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def _noting_messages(operations: Operations) -> Iterator[None]:
    """Notes where the host waits for a collective or a message, and messages of Python objects.

    These are pickled with the names of their modules, so their lengths tell where a class lies.
    """
    stock: Any = dist.Work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        operations.note("wait for a collective")
        return stock(self, *args, **kwargs)

    def sending(name: str, function: Any) -> Any:
        def send(*args: Any, **kwargs: Any) -> Any:
            operations.note(f"{name} of Python objects")
            operations.noting = False
            try:
                return function(*args, **kwargs)
            finally:
                operations.noting = True

        return send

    with contextlib.ExitStack() as patches:
        for name in OBJECTS:
            replacement = sending(name, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, replacement))
        patches.enter_context(mock.patch.object(dist.Work, "wait", wait))
        yield


def digest(value: Any) -> str:
    """A hash of tensors bit by bit, in lists and dictionaries, and of other values as printed."""
    found = hashlib.sha256()
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().cpu()
        found.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
        found.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        found.update(" ".join(f"{k}={digest(v)}" for k, v in value.items()).encode())
    elif isinstance(value, (list, tuple)):
        found.update(" ".join(map(digest, value)).encode())
    else:
        found.update(repr(value).encode())
    return found.hexdigest()[:20]


def _digests(chunks: list[Any], logs: Any) -> dict[str, str]:
    """Of losses, gradients and buffers by name; of what Megatron logs of routers."""
    found = {f"losses of microbatch {n}": digest(log) for n, log in enumerate(logs or ())}
    for number, chunk in enumerate(chunks):
        model = unwrapped(chunk)
        for name, parameter in model.named_parameters():
            gradient = getattr(parameter, "main_grad", parameter.grad)
            found[f"chunk {number}: gradient of {name}"] = digest(gradient)
            found[f"chunk {number}: {name}"] = digest(parameter)
        for name, buffer in model.named_buffers():
            found[f"chunk {number}: buffer {name}"] = digest(buffer)
    from megatron.core import parallel_state

    tracker: Any = getattr(parallel_state, "get_moe_layer_wise_logging_tracker", dict)()
    for name, entry in tracker.items():
        found[f"logged {name}"] = digest(entry.get("values"))
    return found


def _recorded(case: Case, device: torch.device, folder: str) -> dict[str, Any]:
    """A step of a rank."""
    zero, step = prepared(case, device, folder)
    chunks = step.chunks  # type: ignore[attr-defined]
    for _ in range(case.step - 1):
        zero()
        step()
    zero()
    operations, reads = Operations(), HostReads()
    entered: Entered = set()
    profile = profiled(entered) if case.ran else contextlib.nullcontext()
    # Collections come when so many objects were made: another checkout makes others.
    gc.collect()
    gc.disable()
    with _noting_messages(operations), reads, operations, profile:
        logs = step()
    found: dict[str, Any] = {"operations": operations.lines, "places": operations.places}
    found["host waits"] = dict(sorted((operations.waits + reads.counts).items()))
    live = operations.storages.live
    digests = _digests(chunks, logs)
    del logs
    gc.collect()
    kept = operations.storages.live
    gc.enable()
    found["bytes"] = {
        "peak": operations.storages.peak, "after the step": live, "kept by the schedule": kept,
    }  # fmt: skip
    found["digests"] = digests
    found["entered"] = sorted({f"{path}:{function}" for path, _, function in entered})
    if device.type == "cuda":
        found["cuda"] = _on_cuda(zero, step)
    return found


def _on_cuda(zero: Callable[[], None], step: Callable[[], Any]) -> dict[str, int]:
    """Three more steps: kernels by name, peak memory, and synchronisations that torch warns of."""
    zero()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    found = {"peak bytes": torch.cuda.max_memory_allocated() - before}
    zero()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [
        one.name
        for one in profile.events()
        if one.device_type == on_device and not getattr(one, "is_user_annotation", False)
    ]
    found["kernels"] = len(events)
    found |= {f"kernel {name}": num for name, num in collections.Counter(events).items()}
    zero()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    told = [str(one.message) for one in said]
    found["synchronisations"] = sum("synchronizing CUDA operation" in one for one in told)
    return dict(sorted(found.items()))


# --- ranks ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined(case: Case, rank: int, folder: str) -> Iterator[torch.device]:
    """This process as a rank of a case's layout, without the package's own way to start ranks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        cpu_platform().enable()
        if case.kind in ("delta", "own delta", "mamba"):
            cpu_platform().load_recurrent_layers()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.set_num_threads(1)
    if device.type == "cuda":  # else sums by atomics differ from one run to the next
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    store = dist.FileStore(f"{folder}/rendezvous", case.world_size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=case.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.size("tp"), pipeline_model_parallel_size=case.size("pp"),
        virtual_pipeline_model_parallel_size=case.size("vpp") if case.size("vpp") > 1 else None,
        context_parallel_size=case.size("cp"), expert_model_parallel_size=case.size("ep"),
    )  # fmt: skip
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _rank_main(rank: int, name: str, folder: str) -> None:
    """What a rank runs: its record goes into a file of the folder."""
    case = CASES[name]
    with joined(case, rank, folder) as device, stand_ins(case):
        found = _recorded(case, device, folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def on_ranks(function: Callable[..., None], name: str, folder: str) -> list[Any]:
    """Runs `function(rank, name, folder)` in processes of their own; what each wrote as JSON."""
    world = CASES[name].world_size
    on_gpu = torch.cuda.is_available()
    torch.multiprocessing.start_processes(
        function, (name, folder), world, start_method="spawn" if on_gpu else "fork"
    )
    paths = [Path(folder, f"{rank}.json") for rank in range(world)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def imported() -> None:
    """Imports what ranks need, once, before they are forked."""
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    if torch.cuda.is_available():
        return  # they are spawned
    cpu_platform().enable()
    for name in ("models.gpt.gpt_model", "models.gpt.gpt_layer_specs", "distributed"):
        importlib.import_module(f"megatron.core.{name}")
    import megatron_prefix

    _ = megatron_prefix.get_forward_backward_func  # imported at first use


def runnable(names: Sequence[str]) -> list[str]:
    """Those configs that this machine can run; says on stderr which it leaves out."""
    if not torch.cuda.is_available():
        return list(names)
    lacks = {"delta": "fla", "own delta": "fla", "mamba": "mamba_ssm"}
    found = []
    for name in names:
        case = CASES[name]
        missing = lacks.get(case.kind)
        if case.world_size > 1:
            print(f"{name}: left out, it needs several ranks", file=sys.stderr)
        elif case.measures:
            print(f"{name}: left out, a GPU has a clock of its own", file=sys.stderr)
        elif missing and importlib.util.find_spec(missing) is None:
            print(f"{name}: left out, {missing} is not installed", file=sys.stderr)
        else:
            found.append(name)
    return found


def record(names: Sequence[str]) -> dict[str, Any]:
    """The steps of some configs, with every line that is repeated stored once."""
    import megatron.core

    imported()
    table: dict[str, int] = {}
    configs: dict[str, Any] = {}
    for name in runnable(names):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            ranks = on_ranks(_rank_main, name, folder)
        functions = itertools.chain.from_iterable(rank.pop("entered") for rank in ranks)
        if missing := not_entered(CASES[name], functions):
            raise RuntimeError(f"{name}: its step has not entered {', '.join(missing)}")
        for rank in ranks:
            for key in ("operations", "places"):
                rank[key] = [table.setdefault(line, len(table)) for line in rank[key]]
        configs[name] = ranks
        num = sum(len(rank["operations"]) for rank in ranks)
        seconds = time.perf_counter() - begin
        print(f"{name}: {num:,} operations, {seconds:.1f} s", file=sys.stderr)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = {"torch": torch.__version__, "megatron-core": megatron.core.__version__}
    return {"made by": {**versions, "device": machine}, "lines": list(table), "configs": configs}


# --- comparing ------------------------------------------------------------------------------------


class Lines(NamedTuple):
    """Operations of a rank, and their places."""

    lines: list[str]
    places: list[str]


def _lines(record: Mapping[str, Any], rank: Mapping[str, Any], views: bool) -> Lines:
    table = record["lines"]
    pairs = [(table[a], table[b]) for a, b in zip(rank["operations"], rank["places"], strict=True)]
    kept = [pair for pair in pairs if views or not pair[0].startswith("view ")]
    return Lines([line for line, _ in kept], [place for _, place in kept])


def first_difference(old: Lines, new: Lines) -> list[str]:
    """Where two lists of operations part, what comes before, and how their counts differ."""
    pairs = itertools.zip_longest(old.lines, new.lines)
    where = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if where is None:
        return []
    found = [f"operation {where} of {len(old.lines)} before, of {len(new.lines)} now"]
    if where:
        found.append(f"  after {old.lines[where - 1]}")
    for word, side in (("before", old), ("now", new)):
        ended = where >= len(side.lines)
        line = "the end" if ended else side.lines[where]
        place = "" if ended or not side.places[where] else f"  [{side.places[where]}]"
        found.append(f"  {word:6} {line}{place}")
    counts = [collections.Counter(line.partition("(")[0] for line in s.lines) for s in (old, new)]
    changed = {name: counts[1][name] - counts[0][name] for name in counts[0] | counts[1]}
    told = [f"{num:+} {name}" for name, num in sorted(changed.items()) if num]
    return [*found, "  counts " + (", ".join(told) or "are equal")]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], views: bool = True) -> list[str]:
    """What differs between the records of two checkouts, the first difference of every kind.

    Args:
        old: a record.
        new: another one.
        views: also of operations that only look at a tensor in another way.
    """
    found = []
    if old["made by"] != new["made by"]:
        found.append(f"made by {old['made by']} before, by {new['made by']} now")
    for name in {**old["configs"], **new["configs"]}:
        sides = [record["configs"].get(name) for record in (old, new)]
        if None in sides or len(sides[0]) != len(sides[1]):
            counts = [len(side or ()) for side in sides]
            found.append(f"{name}: ranks {counts[0]} before, {counts[1]} now")
            continue
        for number, (before, now) in enumerate(zip(*sides, strict=True)):
            told = first_difference(_lines(old, before, views), _lines(new, now, views))
            for kind in ("host waits", "bytes", "digests", "cuda"):
                told += _unequal(kind, before.get(kind, {}), now.get(kind, {}))
            found += [f"{name}, rank {number}: {told[0]}", *told[1:]] if told else []
    return found


def _unequal(kind: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The first values of a kind that differ, and how many more."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return []
    first = names[0]
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"{kind}: {first} {before.get(first)} before, {now.get(first)} now{more}"]


def summary(record: Mapping[str, Any]) -> str:
    """How much a record says, in a line."""
    ranks = [rank for config in record["configs"].values() for rank in config]
    num = sum(len(rank["operations"]) for rank in ranks)
    digests = sum(len(rank["digests"]) for rank in ranks)
    configs = len(record["configs"])
    return f"{configs} configs, {len(ranks)} ranks, {num:,} operations, {digests:,} digests"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 1 where `compare` finds a difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="write down the steps of this checkout")
    recording.add_argument("out", type=Path)
    recording.add_argument("--configs", default=",".join(CASES), help="names of some (default all)")
    comparing = verbs.add_parser("compare", help="compare two records")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--ignore-views", action="store_true", help="leave views out")
    args = parser.parse_args(arguments)
    if args.verb == "record":
        names = args.configs.split(",")
        if unknown := [name for name in names if name not in CASES]:
            parser.error(f"there is no config {unknown[0]}; there are {', '.join(CASES)}")
        args.out.write_text(json.dumps(record(names)), encoding="utf-8")
        return 0
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (args.old, args.new))
    found = differences(old, new, views=not args.ignore_views)
    print("\n".join(found) if found else f"the same: {summary(new)}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
