"""ModelSpec and Layout -> Megatron's TransformerConfig."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch
from packaging.version import Version

from megatron_prefix.errors import UserError, shown
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.plan.recurrent_spec import GatedDelta, Mamba

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
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


def check_layout(spec: ModelSpec, layout: Layout) -> None:
    """Refuse a layout that does not fit the model.

    Raises:
        UserError: names both numbers and the fix.
    """
    stages = layout.pp * layout.vpp
    if spec.num_layers % stages:
        raise UserError(
            f"model {spec.name} has {spec.num_layers} layers, which {stages} pipeline stages "
            f"(pp {layout.pp} * vpp {layout.vpp}) do not divide; change --pp or --vpp"
        )
    if spec.num_query_groups % layout.tp:
        raise UserError(
            f"model {spec.name} has {spec.num_query_groups} key/value heads, which --tp "
            f"{layout.tp} does not divide; use a smaller --tp"
        )
    if spec.ffn_hidden_size % layout.tp or (spec.moe_ffn_hidden_size or 0) % layout.tp:
        raise UserError(f"model {spec.name}: --tp {layout.tp} does not divide the MLP's width")
    if layout.ep > 1 and not spec.is_moe:
        raise UserError(f"model {spec.name} has no experts; leave --ep {layout.ep} out")
    if spec.is_moe and (spec.num_experts or 0) % layout.ep:
        raise UserError(
            f"model {spec.name} has {spec.num_experts} experts, which --ep {layout.ep} does not "
            "divide; use a smaller --ep"
        )
    if spec.is_moe and layout.tp > 1 and not layout.sequence_parallel:
        raise UserError(
            f"model {spec.name} has experts and --tp is {layout.tp}: Megatron-Core wants sequence "
            "parallelism then; add --sequence-parallel"
        )
    if spec.recurrent is not None:
        _check_recurrent(spec, layout)


def _check_recurrent(spec: ModelSpec, layout: Layout) -> None:
    """Refuse layouts that Megatron's recurrent layers do not have."""
    import megatron.core

    release = Version(Version(megatron.core.__version__).base_version)
    layers: Any = spec.recurrent
    is_mamba = isinstance(layers, Mamba)
    name, heads = ("groups", layers.groups) if is_mamba else ("key heads", layers.key_heads)
    if spec.pattern and not is_mamba and release < Version("0.17"):
        raise UserError(
            f"model {spec.name}: hybrid models have no GatedDeltaNet (G) before megatron-core 0.17;"
            f" leave G out of {spec.pattern}"
        )
    if heads % layout.tp:
        raise UserError(
            f"model {spec.name} has {heads} {name} in its recurrent layers, which --tp {layout.tp}"
            " does not divide; use a smaller --tp"
        )
    if layout.cp > 1 and not is_mamba and release < Version("0.18"):
        raise UserError(
            f"model {spec.name}: GatedDeltaNet has no context parallelism before megatron-core"
            f" 0.18; leave --cp {layout.cp} out"
        )
    if layout.vpp > 1 and spec.pattern and release < Version("0.17"):
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
    from megatron.core.transformer.transformer_config import TransformerConfig

    check_layout(spec, layout)
    values = {
        **_shape(spec),
        **_recurrent(spec),
        **_experts(spec, dtype),
        **_parallel(layout, dtype),
        **_recompute(recompute),
        **_kernels(spec, dtype, device, transformer_engine),
        **(overrides or {}),
    }
    with warnings.catch_warnings():
        # It warns of two options that are not used here, for every config.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        warnings.filterwarnings("ignore", message="If you are using transformer_engine")
        try:
            return TransformerConfig(**values)
        except (AssertionError, NotImplementedError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"model {shown(spec.name)}: Megatron-Core refuses this configuration ({reason});"
                " change the fields it names"
            ) from None


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """Initialise nothing: lab/models/weights.py fills every parameter."""
    return weight


def _shape(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_query_groups,
        "kv_channels": spec.kv_channels,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "qk_layernorm": spec.qk_layernorm,
        "gated_linear_unit": not spec.squared_relu,
        "activation_func": _squared_relu if spec.squared_relu else torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": spec.add_qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
    }


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.relu(x).square()


def _recurrent(spec: ModelSpec) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if spec.output_gate:
        values["attention_output_gate"] = True
    layers = spec.recurrent
    if spec.pattern:
        values["is_hybrid_model"] = True
    elif isinstance(layers, GatedDelta):
        values.update(
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=layers.attention_every,
        )
    if isinstance(layers, GatedDelta):
        values.update(
            linear_conv_kernel_dim=layers.conv_width,
            linear_key_head_dim=layers.key_dim,
            linear_value_head_dim=layers.value_dim,
            linear_num_key_heads=layers.key_heads,
            linear_num_value_heads=layers.value_heads,
        )
    elif layers is not None:
        values.update(
            mamba_state_dim=layers.state_dim,
            mamba_head_dim=layers.head_dim,
            mamba_num_groups=layers.groups,
            mamba_num_heads=layers.heads,
        )
    return values


def _experts(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    # variable_seq_lengths needs the all-to-all dispatcher, even in a dense model.
    values: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    if spec.is_moe:
        values.update(
            num_moe_experts=spec.num_experts,
            moe_ffn_hidden_size=spec.moe_ffn_hidden_size,
            moe_router_topk=spec.moe_top_k,
            # softmax over the chosen experts = softmax over all, scaled to sum to 1
            moe_router_pre_softmax=not spec.moe_normalize_top_k,
            moe_router_load_balancing_type=spec.moe_load_balancing,
            moe_aux_loss_coeff=spec.moe_aux_loss_coeff,
            moe_z_loss_coeff=spec.moe_z_loss_coeff,
            moe_router_dtype="fp64" if dtype == torch.float64 else "fp32",
        )
        if spec.moe_shared_width:
            values.update(
                moe_shared_expert_intermediate_size=spec.moe_shared_width,
                moe_shared_expert_gate=True,
            )
        if spec.moe_layers is not None:
            values["moe_layer_freq"] = [int(flag) for flag in spec.moe_layers]
    return values


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
    has_bias_kernel = fused and not spec.squared_relu
    with_te = fused and transformer_engine
    values: dict[str, Any] = {
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        "use_cpu_initialization": device.type == "cpu",
        "masked_softmax_fusion": False,
        "bias_activation_fusion": has_bias_kernel,
        "apply_rope_fusion": with_te,
        "moe_permute_fusion": False,
        "moe_grouped_gemm": with_te and spec.is_moe,
        "gradient_accumulation_fusion": with_te and _has("fused_weight_gradient_mlp_cuda"),
    }
    if with_te:
        values.update(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    return values


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
