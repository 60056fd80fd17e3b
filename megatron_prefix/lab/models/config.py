"""ModelSpec and Layout -> Megatron's TransformerConfig."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_prefix.errors import UserError, listed, shown
from megatron_prefix.lab.models.presets import AHEAD, LATENT, ModelSpec, YarnScaling
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.layers.precision import segment_multiple

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_OF_MODELS = {
    *("name", "vocab_size", "max_position", "rope", "rotary_base", "rotary_percent"),
    *("rope_scaling", "tie_embeddings", "hybrid_override_pattern", "quick_geglu"),
    "mtp_hybrid_override_pattern",
}
"""Fields of a spec that no TransformerConfig has: arguments of Megatron's models (build.py)."""
RECOMPUTE = ("none", "full", "selective")


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """torch's dtype by name.

    Raises:
        UserError: no model can be built in it.
    """
    for known, dtype in DTYPES.items():
        if name in (known, dtype):
            return dtype
    raise UserError(f"dtype {name!r} is not supported; choose one of {', '.join(DTYPES)}")


def alignment(spec: ModelSpec, layout: Layout) -> int:
    """What both schedules pad rollouts to: what the layout needs, and products in FP8."""
    ranks = layout.tp if layout.sequence_parallel else 1
    return math.lcm(layout.alignment, segment_multiple(spec, ranks, layout.cp))


def check_layout(spec: ModelSpec, layout: Layout) -> None:
    """Refuse a layout that does not fit the model.

    Raises:
        UserError: names both numbers and the fix.
    """
    layout.check_layers(spec.name, spec.num_layers)
    if spec.num_query_groups % layout.tp:
        raise UserError(
            f"model {spec.name} has {spec.num_query_groups} key/value heads, which --tp "
            f"{layout.tp} does not divide; use a smaller --tp"
        )
    if spec.ffn_hidden_size % layout.tp or (spec.moe_ffn_hidden_size or 0) % layout.tp:
        widths = listed(filter(None, (spec.ffn_hidden_size, spec.moe_ffn_hidden_size)))
        raise UserError(
            f"model {spec.name} has MLPs of width {widths}, which --tp {layout.tp} does not divide;"
            " use a smaller --tp"
        )
    if layout.ep > 1 and not spec.is_moe:
        raise UserError(f"model {spec.name} has no experts; leave --ep {layout.ep} out")
    if spec.is_moe and (spec.num_moe_experts or 0) % layout.ep:
        raise UserError(
            f"model {spec.name} has {spec.num_moe_experts} experts, which --ep {layout.ep} does"
            " not divide; use a smaller --ep"
        )
    if spec.is_moe and layout.tp > 1 and not layout.sequence_parallel:
        raise UserError(
            f"model {spec.name} has experts and --tp is {layout.tp}: Megatron-Core needs sequence "
            "parallelism then; add --sequence-parallel"
        )
    _check_local(spec, layout)
    if spec.is_hybrid_model or spec.recurrent:
        _check_recurrent(spec, layout)


def _check_local(spec: ModelSpec, layout: Layout) -> None:
    """Refuse layouts that Megatron's layers do not have, or in which they are wrong."""
    from megatron_prefix.layers.releases import is_since

    if spec.is_moe and spec.add_bias_linear and layout.tp > 1:
        raise UserError(
            f"model {spec.name} has experts with biases, which Megatron-Core does not split over"
            f" tensor-parallel ranks; leave --tp {layout.tp} out"
        )
    norms_latents = spec.multi_latent_attention and spec.qk_layernorm
    if norms_latents and spec.q_lora_rank is None and is_since("0.19"):
        raise UserError(
            f"model {spec.name} has no q_lora_rank: from 0.19 on Megatron-Core puts a norm before"
            " its query projection, which it lacks; use megatron-core 0.18 or older"
        )
    if spec.multi_latent_attention and layout.tp > 1 and not layout.sequence_parallel:
        raise UserError(
            f"model {spec.name} has multi-latent attention and --tp is {layout.tp}: without"
            " sequence parallelism Megatron-Core computes wrong gradients then; add"
            " --sequence-parallel"
        )


def _check_recurrent(spec: ModelSpec, layout: Layout) -> None:
    """Refuse layouts that Megatron's recurrent layers do not have."""
    from megatron_prefix.layers.releases import is_since

    pattern = spec.hybrid_override_pattern
    for kind in spec.recurrent:
        if pattern and not is_since(kind.hybrid_since):
            raise UserError(
                f"model {spec.name}: hybrid models have no {kind.name} ({kind.symbol}) before"
                f" megatron-core {kind.hybrid_since}; leave {kind.symbol} out of {pattern}"
            )
        if layout.cp > 1 and not is_since(kind.cp_since):
            raise UserError(
                f"model {spec.name}: {kind.name} has no context parallelism before megatron-core"
                f" {kind.cp_since}; leave --cp {layout.cp} out"
            )
        heads = getattr(spec, kind.divides[0])
        if heads % layout.tp:
            name = kind.divides[0].partition("num_")[2].replace("_", " ")
            raise UserError(
                f"model {spec.name} has {heads} {name} in its recurrent layers, which --tp"
                f" {layout.tp} does not divide; use a smaller --tp"
            )
    if layout.vpp > 1 and pattern and not is_since("0.17"):
        raise UserError(
            f"model {spec.name}: hybrid models have no virtual stages before megatron-core 0.17;"
            f" leave --vpp {layout.vpp} out"
        )


def transformer_config(
    spec: ModelSpec,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    *,
    transformer_engine: bool,
    recompute: str = "none",
    overrides: dict[str, Any] | None = None,
) -> Any:
    """Megatron's TransformerConfig for `spec`, without dropout and without random weights.

    On the CPU every fused kernel is off. In float64 only the RoPE table is narrower; in bfloat16
    softmax and router compute in float32.

    Args:
        overrides: fields of TransformerConfig; they win over everything else.

    Raises:
        UserError: unknown `recompute`, or `layout` does not fit `spec`.
    """
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    check_layout(spec, layout)
    values = {
        **_fields(spec, dtype),
        **_parallel(layout, dtype),
        **_recompute(recompute),
        **_kernels(spec, dtype, device, transformer_engine),
        **(overrides or {}),
    }
    with warnings.catch_warnings():
        # It warns of two options that are not used here, for every config.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        warnings.filterwarnings("ignore", message="If you are using transformer_engine")
        with megatrons_refusals(spec):
            kind = MLATransformerConfig if values["multi_latent_attention"] else TransformerConfig
            _check_known(kind, values)
            config = kind(**values)
    return _with_yarn(config, spec)


def _check_known(kind: type, values: Mapping[str, Any]) -> None:
    missing = [name for name in AHEAD if name in values and not hasattr(kind, name)]
    if missing:
        raise UserError(
            f"this release of Megatron-Core has no {missing[0]}; use a newer one, or leave it out"
        )


@contextlib.contextmanager
def megatrons_refusals(spec: ModelSpec) -> Iterator[None]:
    """What Megatron's own code asserts or cannot build of a model inside is a UserError."""
    try:
        yield
    except (AssertionError, IndexError, NotImplementedError, ValueError) as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        file = frame.f_code.co_filename
        if isinstance(error, UserError) or "/megatron/core/" not in file:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"model {shown(spec.name)}: Megatron-Core refuses this configuration ({reason};"
            f" {file.rpartition('/megatron/core/')[2]}:{line}); change the fields it names"
        ) from error


def _with_yarn(config: Any, spec: ModelSpec) -> Any:
    """The config with the attributes that GPTModel reads for YaRN."""
    if isinstance(spec.rope_scaling, YarnScaling):
        config.yarn_rotary_scaling_factor = spec.rope_scaling.factor
        config.yarn_original_max_position_embeddings = spec.rope_scaling.original_max_position
        config.yarn_beta_fast = spec.rope_scaling.beta_fast
        config.yarn_beta_slow = spec.rope_scaling.beta_slow
        config.yarn_mscale = config.yarn_mscale_all_dim = None
        config.yarn_correction_range_round_to_int = spec.rope_scaling.rounds
    return config


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """Initialise nothing: lab/models/weights.py fills every parameter."""
    return weight


def _fields(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """The spec's own fields, which are Megatron's, and what all its models have in common."""
    names = {field.name for field in dataclasses.fields(spec)} - _OF_MODELS
    values = {name: getattr(spec, name) for name in names}
    if spec.is_moe:
        if not isinstance(spec.moe_layer_freq, int):
            values["moe_layer_freq"] = [int(flag) for flag in spec.moe_layer_freq]
        values["moe_router_dtype"] = "fp64" if dtype == torch.float64 else "fp32"
    else:
        values = {name: value for name, value in values.items() if not name.startswith("moe_")}
    if spec.multi_latent_attention:
        values |= {name: getattr(spec, name) for name in ("rotary_base", "rotary_percent")}
    else:
        values = {name: value for name, value in values.items() if name not in LATENT}
    for name in AHEAD:
        if not values[name]:
            del values[name]
    if isinstance(spec.window_attn_skip_freq, tuple):
        values["window_attn_skip_freq"] = [*spec.window_attn_skip_freq]
    return {
        **values,
        "is_hybrid_model": spec.is_hybrid_model,
        "normalization": "RMSNorm",
        "activation_func": _activation(spec),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        # variable_seq_lengths needs the all-to-all dispatcher, even in a dense model.
        "moe_token_dispatcher_type": "alltoall",
    }


def _activation(spec: ModelSpec) -> Any:
    """Of an MLP, or of its gate."""
    if not spec.gated_linear_unit:
        return _squared_relu
    if not spec.quick_geglu:
        return torch.nn.functional.silu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return quick_gelu


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.relu(x).square()


def _parallel(layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": True,
    }
    if layout.vpp > 1:
        # With batch_p2p_comm, pp 2 over gloo gives wrong gradients without an error.
        values.update(
            virtual_pipeline_model_parallel_size=layout.vpp,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
        )
    return values


def _recompute(recompute: str) -> dict[str, Any]:
    if recompute not in RECOMPUTE:
        raise UserError(f"recompute {recompute!r} is not known; choose one of {RECOMPUTE}")
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return {"recompute_granularity": "selective"} if recompute == "selective" else {}


def _kernels(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, transformer_engine: bool
) -> dict[str, Any]:
    fused = device.type == "cuda" and dtype == torch.bfloat16
    has_bias_kernel = fused and spec.gated_linear_unit and (spec.is_moe or not spec.quick_geglu)
    with_te = fused and transformer_engine
    is_yarn = isinstance(spec.rope_scaling, YarnScaling)  # whose scale the kernel leaves out
    can_fuse_rope = spec.rope_type == "yarn" if spec.multi_latent_attention else not is_yarn
    values: dict[str, Any] = {
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        "use_cpu_initialization": device.type == "cpu",
        "masked_softmax_fusion": False,
        "bias_activation_fusion": has_bias_kernel,
        "apply_rope_fusion": with_te and can_fuse_rope,
        "moe_permute_fusion": with_te and spec.is_moe and _fuses("2.1.0"),
        "moe_router_fusion": with_te and spec.is_moe and _fuses("2.7.0"),
        "moe_grouped_gemm": with_te and spec.is_moe,
        "gradient_accumulation_fusion": with_te and _has("fused_weight_gradient_mlp_cuda"),
    }
    if with_te:
        values.update(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    return values


def _fuses(version: str) -> bool:
    """Whether transformer-engine has a kernel since a version, from which on Megatron takes it
    (megatron/core/extensions/transformer_engine.py)."""
    from megatron.core.utils import is_te_min_version

    return bool(is_te_min_version(version))


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
