"""Specs of Megatron's hybrid models: GatedDeltaNet in a GPTModel, and MambaModel.

Megatron's own specs of these layers need transformer-engine. Those for its local layers are here.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from megatron_prefix.lab.models.local import RMSNorm, localize
from megatron_prefix.lab.models.presets import ModelSpec

try:  # since 0.18; MambaModel is its old name
    from megatron.core.models.hybrid.hybrid_model import HybridModel as StockModel
except ImportError:
    from megatron.core.models.mamba.mamba_model import MambaModel as StockModel


def with_gated_delta_net(block: Any, config: Any, vp_stage: int | None) -> None:
    """Puts GatedDeltaNet into the local layers of one chunk, if the config wants it."""
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]  # one object
    for number, layer in enumerate(block.layer_specs, offset + 1):
        if number % config.linear_attention_freq:
            layer.submodules.self_attention = _gated_delta_net()


def _gated_delta_net() -> ModuleSpec:
    linears = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    return ModuleSpec(
        module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(out_norm=RMSNorm, **linears)
    )


def hybrid_model(
    config: Any, spec: ModelSpec, engine: bool, vp_stage: int | None, options: dict[str, Any]
) -> Any:
    """A hybrid model of one stage.

    Args:
        config: the TransformerConfig.
        spec: has the pattern.
        engine: transformer-engine's layers, else local ones.
        vp_stage: the virtual stage, if there are any.
        options: of Megatron's language models.
    """
    if engine:
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as stack
    else:
        stack = _local_stack(config, spec)
    pattern = spec.hybrid_override_pattern
    if "hybrid_layer_pattern" not in inspect.signature(StockModel.__init__).parameters:
        return HybridModel(config, stack, hybrid_override_pattern=pattern, **options)
    virtual = config.virtual_pipeline_model_parallel_size or 1
    per_stage = len(pattern) // (config.pipeline_model_parallel_size * virtual)
    parts = [pattern[n : n + per_stage] for n in range(0, len(pattern), per_stage)]
    options["vp_stage"] = vp_stage
    behind = f"/{spec.mtp_hybrid_override_pattern}" * (spec.mtp_num_layers or 0)
    return HybridModel(config, stack, hybrid_layer_pattern="|".join(parts) + behind, **options)


def _local_stack(config: Any, spec: ModelSpec) -> ModuleSpec:
    """Local layers of all kinds: each a norm, one module, and the sum with its input."""

    def alone(module: Any, layer: Any, *kept: str) -> ModuleSpec:
        parts = {name: getattr(layer, name) for name in kept}
        return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**parts))

    def local(num_experts: int | None) -> Any:
        layer = get_gpt_layer_local_spec(
            num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        ).submodules
        localize(layer, config)
        return layer

    mlp = "pre_mlp_layernorm", "mlp", "mlp_bda"
    attention = "input_layernorm", "self_attention", "self_attn_bda"
    plain, delta = local(None), local(None)
    delta.self_attention = _gated_delta_net()
    experts = local(spec.num_moe_experts) if spec.is_moe else plain
    parts = {"attention_layer": alone(TransformerLayer, plain, *attention)}
    if hasattr(MambaStackSubmodules, "gdn_layer"):  # since 0.17
        parts["gdn_layer"] = alone(TransformerLayer, delta, *attention)
    if spec.mtp_num_layers:
        parts["mtp_block_spec"] = _mtp_block()
    return ModuleSpec(
        module=LocalStack,
        submodules=MambaStackSubmodules(
            **parts,
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=RMSNorm, mixer=_mamba_mixer(), mamba_bda=get_bias_dropout_add
                ),
            ),
            mlp_layer=alone(MLPLayer, plain, *mlp),
            moe_layer=alone(TransformerLayer, experts, *mlp),
        ),
    )


def _mtp_block() -> ModuleSpec:
    """Multi-token prediction with local layers; Megatron makes the stack inside by its pattern."""
    from megatron.core.transformer import multi_token_prediction as megatrons

    norms = {"enorm": RMSNorm, "hnorm": RMSNorm, "layer_norm": RMSNorm}
    layer = ModuleSpec(
        module=megatrons.MultiTokenPredictionLayer,
        submodules=megatrons.MultiTokenPredictionLayerSubmodules(
            eh_proj=ColumnParallelLinear, mtp_model_layer=None, **norms
        ),
    )
    return ModuleSpec(
        module=megatrons.MultiTokenPredictionBlock,
        submodules=megatrons.MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )


def _mamba_mixer() -> ModuleSpec:
    # Its import wants triton, or the stand-ins of `cpu.load_recurrent_layers`.
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules

    linears = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    return ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(**linears))


class HybridModel(StockModel):  # type: ignore[misc]
    """Megatron's hybrid model, called as a GPTModel is: with `loss_mask`, which only multi-token
    prediction reads."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """See Megatron's; without multi-token prediction loss_mask is left out."""
        given = input_ids, position_ids, attention_mask, decoder_input, labels
        if self.config.mtp_num_layers:
            others["loss_mask"] = loss_mask
        output: Tensor = super().forward(*given, **others)
        return output


class LocalStack(MambaStack):
    """Megatron's stack with a final norm that does not need transformer-engine."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **{**kwargs, "post_layer_norm": False})
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
