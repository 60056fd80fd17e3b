"""ModelSpec -> Megatron model chunks, ready for a Megatron schedule."""

from __future__ import annotations

import copy
import os
import types
from typing import Any, NamedTuple

import torch

from megatron_prefix.errors import UserError, shown
from megatron_prefix.lab.models import weights
from megatron_prefix.lab.models.config import (
    dtype_of,
    megatrons_refusals,
    transformer_config,
)
from megatron_prefix.lab.models.hf_weights import HFWeights
from megatron_prefix.lab.models.logprobs import vocab_parallel_log_probs
from megatron_prefix.lab.models.optimizer import build_optimizer
from megatron_prefix.lab.models.presets import ModelSpec, RopeScaling, YarnScaling
from megatron_prefix.lab.platforms import cpu
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.layers.releases import transformer_layers

__all__ = ["build_model", "build_optimizer", "has_transformer_engine", "unwrap"]

LAYER_SPECS = ("auto", "local", "te")


def has_transformer_engine() -> bool:
    """Whether Megatron can use transformer-engine's layers in this process."""
    from megatron.core.models.gpt import gpt_layer_specs

    return bool(gpt_layer_specs.HAVE_TE)


def build_model(
    spec: ModelSpec,
    *,
    layout: Layout | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    layer_spec: str = "auto",
    recompute: str = "none",
    seed: int = 1234,
    wrap_ddp: bool = True,
    use_distributed_optimizer: bool = False,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    bucket_size: int | None = None,
    exact_loss: bool | None = None,
    config_overrides: dict[str, Any] | None = None,
    load_hf: str | None = None,
    sdpa: bool = False,
) -> list[Any]:
    # long: the one place where every option of a model is passed on
    """This rank's model chunks: one GPTModel a virtual pipeline stage, in order.

    The process groups must exist (`runtime.initialize`). Weights are random, by `seed`, or those of
    `load_hf`, and the same in every layout. The config gets what Megatron's training loop sets for
    schedules (`finalize_model_grads_func`, and `no_sync_func` when reductions overlap);
    `build_optimizer` adds `grad_scale_func`.

    Args:
        dtype: of parameters and activations: float64 (local spec only), float32 or bfloat16.
            Gradients are summed in float32, in float64 for float64 parameters.
        layer_spec: "te" for transformer-engine's layers, "local" for Megatron's own, "auto" for
            "te" on a GPU in 16 bit if it is installed, else "local".
        recompute: "none", "full" (every layer) or "selective" (core attention).
        wrap_ddp: wrap each chunk in Megatron's DistributedDataParallel, which holds `main_grad`.
        overlap_grad_reduce: reduce gradients during the backward pass, in buckets of
            `bucket_size` elements (None: Megatron's default).
        overlap_param_gather: gather weights of the distributed optimizer during forwards.
        exact_loss: compute the loss by `vocab_parallel_log_probs` instead of Megatron's float32
            cross entropy; None: only for float64.
        config_overrides: fields of TransformerConfig; they win over all other options.
        load_hf: folder of a Hugging Face checkpoint whose weights take the place of random ones.
        sdpa: attention by torch's `scaled_dot_product_attention` instead of the layers' own.

    Raises:
        UserError: options that contradict one another or the machine, or `HFWeights` refuses the
            folder.
    """
    layout, dtype, device = layout or Layout(), dtype_of(dtype), torch.device(device)
    if spec.vocab_size is None:
        raise UserError(
            f"model {spec.name} takes its vocabulary from the rollouts; call with_vocab(size)"
        )
    if sdpa and (spec.window_size is not None or spec.softmax_type != "vanilla"):
        raise UserError(
            f"model {spec.name}: torch's attention has neither windows nor learned sinks; take a"
            " model without them"
        )
    engine = _use_transformer_engine(layer_spec, dtype, device)
    if spec.fp8 is not None and not (engine and dtype == torch.bfloat16):
        raise UserError(
            f"model {shown(spec.name)}: fp8 {spec.fp8} needs transformer-engine, a GPU and"
            " bfloat16; leave it out"
        )
    _check_memory(spec, layout, dtype, device)
    config = transformer_config(
        spec,
        layout,
        dtype,
        device,
        transformer_engine=engine,
        recompute=recompute,
        overrides=config_overrides,
    )
    exact = dtype == torch.float64 if exact_loss is None else exact_loss
    source = None if load_hf is None else HFWeights(load_hf, spec)
    recipe = _Recipe(spec, layout, config, device, engine, seed, exact, source, sdpa)
    with megatrons_refusals(spec):
        chunks = [build_chunk(recipe, stage) for stage in range(layout.vpp)]
    if wrap_ddp:
        options = {
            "use_distributed_optimizer": use_distributed_optimizer,
            "overlap_grad_reduce": overlap_grad_reduce,
            "overlap_param_gather": overlap_param_gather,
            "bucket_size": bucket_size,
            "grad_reduce_in_fp32": dtype == torch.bfloat16,
        }
        chunks = [_wrap_ddp(config, chunk, options, n) for n, chunk in enumerate(chunks)]
    _prepare_schedule(config, chunks, wrap_ddp, overlap_grad_reduce)
    return chunks


class _Recipe(NamedTuple):
    """What all chunks of a rank have in common."""

    spec: ModelSpec
    layout: Layout
    config: Any
    device: torch.device
    engine: bool
    seed: int
    exact: bool
    source: HFWeights | None
    sdpa: bool


def unwrap(chunk: Any) -> Any:
    """The language model inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _check_memory(
    spec: ModelSpec, layout: Layout, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a model whose weights alone do not fit; allocating them would end the process."""
    share = spec.parameters() / (layout.tp * layout.pp * layout.ep)
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[1]
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if share * dtype.itemsize > room:
        raise UserError(
            f"model {shown(spec.name)} has {spec.parameters():.3g} parameters, whose"
            f" {share * dtype.itemsize / 2**30:.3g} GiB per rank do not fit in the"
            f" {room / 2**30:.3g} GiB of this machine's {device.type}; make the model smaller, or"
            " raise --tp or --pp"
        )


def _use_transformer_engine(layer_spec: str, dtype: torch.dtype, device: torch.device) -> bool:
    if layer_spec not in LAYER_SPECS:
        raise UserError(f"layer spec {layer_spec!r} is not known; choose one of {LAYER_SPECS}")
    wants = device.type == "cuda" and dtype != torch.float64
    if layer_spec == "te" and not (wants and has_transformer_engine()):
        raise UserError(
            "layer spec 'te' needs transformer-engine, a GPU, and float32 or bfloat16; "
            f"here: installed {has_transformer_engine()}, device {device.type}, dtype {dtype}"
        )
    if layer_spec == "auto":
        return wants and dtype == torch.bfloat16 and has_transformer_engine()
    return layer_spec == "te"


def build_chunk(recipe: _Recipe, stage: int) -> Any:
    """One chunk of this rank, with weights, in its dtype."""
    from megatron.core.tensor_parallel import (
        set_defaults_if_not_set_tensor_model_parallel_attributes,
    )
    from megatron.core.transformer.module import Float16Module

    model = _language_model(recipe, stage)
    if recipe.sdpa:
        from megatron_prefix.lab.models.local import use_sdpa

        use_sdpa(model)
    if recipe.spec.is_moe and recipe.spec.add_bias_linear and not recipe.engine:
        from megatron_prefix.lab.models.local import copy_outputs

        copy_outputs(model)
    model.to(recipe.device)
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    half = recipe.config.bf16
    chunk = Float16Module(recipe.config, model) if half else model.to(recipe.config.params_dtype)
    if recipe.source is None:
        weights.fill(model, recipe.spec, recipe.seed)
    else:
        recipe.source.fill(model)
    if recipe.config.params_dtype == torch.float64:
        _keep_float64(model, recipe.spec)
    if recipe.exact:
        model.compute_language_model_loss = types.MethodType(exact_loss, model)
    return chunk


def _language_model(recipe: _Recipe, stage: int) -> Any:
    """Megatron's GPTModel or HybridModel of one virtual stage; weights are not filled in yet."""
    from megatron.core import parallel_state

    spec, layout = recipe.spec, recipe.layout
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    vp_stage = stage if layout.vpp > 1 else None
    options: dict[str, Any] = {
        "vocab_size": weights.padded_vocab(spec.vocab_size or 0, layout.tp),
        "max_sequence_length": spec.max_position,
        "pre_process": pipeline == 0 and stage == 0,
        "post_process": pipeline == layout.pp - 1 and stage == layout.vpp - 1,
        "position_embedding_type": _positions(spec),
        "rotary_percent": spec.rotary_percent,
        "rotary_base": spec.rotary_base,
        "share_embeddings_and_output_weights": spec.tie_embeddings,
    }
    if spec.is_hybrid_model or spec.recurrent:
        cpu.load_recurrent_layers()
    if spec.is_hybrid_model:
        from megatron_prefix.lab.models.hybrid import hybrid_model

        return hybrid_model(recipe.config, spec, recipe.engine, vp_stage, options)
    return _gpt_model(recipe, vp_stage, options)


def _positions(spec: ModelSpec) -> str:
    """GPTModel's position_embedding_type."""
    if not spec.rope:
        return "none"
    return "yarn" if isinstance(spec.rope_scaling, YarnScaling) else "rope"


def _gpt_model(recipe: _Recipe, vp_stage: int | None, options: dict[str, Any]) -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = recipe.spec
    block = block_spec(recipe.config, recipe.engine, vp_stage)
    return GPTModel(
        recipe.config,
        block,
        mtp_block_spec=mtp_spec(recipe.config, block, recipe.engine, vp_stage),
        rope_scaling=isinstance(spec.rope_scaling, RopeScaling),
        rope_scaling_factor=spec.rope_scaling.factor if spec.rope_scaling else 1.0,
        vp_stage=vp_stage,
        **options,
    )


def exact_loss(model: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Replaces LanguageModule.compute_language_model_loss: [b, s], [s, b, V/tp] -> [b, s]."""
    return -vocab_parallel_log_probs(logits, labels, model.pg_collection.tp)


def _keep_float64(model: Any, spec: ModelSpec) -> None:
    """Recurrences, gates of attention and routers compute in float32 unless told otherwise."""
    from megatron_prefix.lab.models.local import is_dsa, keep_float64

    for layer in dict.fromkeys(transformer_layers(model)):
        gated = spec.attention_output_gate or is_dsa(model.config)
        if spec.is_hybrid_model or spec.recurrent or gated:
            keep_float64(layer)
        elif hasattr(layer.mlp, "router"):
            keep_float64(layer.mlp.router)


def block_spec(config: Any, engine: bool, vp_stage: int | None) -> Any:
    """The layers of one chunk; local ones allow packing, sequence and context parallelism."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_prefix.lab.models.local import RMSNorm, localize

    recurrent = config.experimental_attention_variant not in (None, "dsa")
    if engine and recurrent:
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_transformer_block_with_experimental_attention_variant_spec as with_variant,
        )

        return with_variant(config, vp_stage=vp_stage)
    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # else 0.19 refuses local layers
    block = get_gpt_decoder_block_spec(
        plain, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    if engine:
        return block
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        localize(layer.submodules, config)
    if recurrent:
        from megatron_prefix.lab.models.hybrid import with_gated_delta_net

        with_gated_delta_net(block, config, vp_stage)
    return block


def mtp_spec(config: Any, block: Any, engine: bool, vp_stage: int | None) -> Any:
    """The layer of multi-token prediction of one chunk, a last layer of `block` inside; None if it
    has none."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from megatron_prefix.lab.models.local import RMSNorm

    if not config.mtp_num_layers:
        return None
    found = get_gpt_mtp_block_spec(config, block, engine, vp_stage=vp_stage)
    for layer in found.layer_specs if found is not None and not engine else ():
        parts = layer.submodules
        parts.enorm = parts.hnorm = parts.layer_norm = RMSNorm
    return found


def _wrap_ddp(config: Any, chunk: Any, options: dict[str, Any], index: int) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    # Only the first chunk's reductions can overlap with a backward, so only it gets buckets.
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(**options),
        chunk,
        disable_bucketing=index > 0,
    )


def _prepare_schedule(config: Any, chunks: list[Any], ddp: bool, overlap: bool) -> None:
    """Set on the config what Megatron's `train` sets before it calls a schedule."""
    from megatron.core.distributed import finalize_model_grads

    for chunk in chunks:
        chunk.train()
    if not ddp:
        return
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
