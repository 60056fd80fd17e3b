"""Vision-language models of Megatron-Bridge, built small on the CPU from their own sources.

Qwen3-VL's tower needs a GPU, so that of transformers is in its place.  Kimi's tower comes with its
checkpoint; MindSpeed-MM has a copy of that file, with lines of its own for other devices and for
parallelism, neither of which run here.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from benchmarks.trainers.vision_sources import (
    KIMI,
    SOURCES,
    load,
    named,
    stand_in,
    tower_config,
    typed,
)
from megatron_prefix.tree import cp_layout

REMOTE = "transformers_modules.kimi.modeling_kimi_k25"
"""The name that transformers gives to such a file."""
PATCH = 64
"""Pixels of a side of Nemotron's patches, so that its table of positions is small."""
SOUND = 61
"""The token of a clip's rows; the one before it begins a clip."""
FLASH = "flash_attention_2"


def qwen3(name: str, config: Any, spec: Any, **options: Any) -> Any:
    """With transformers' tower in the place of its own."""
    from transformers.models.qwen3_vl import configuration_qwen3_vl

    from tests.harness.vision import IMAGE

    path = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
    load()
    stand_in("megatron.bridge.utils.vocab_utils", calculate_padded_vocab_size=None)
    module = importlib.import_module(f"{path}.model")
    vision = tower_config(
        configuration_qwen3_vl.Qwen3VLVisionConfig, out_hidden_size=config.hidden_size,
        num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
    )  # fmt: skip
    attention = types.SimpleNamespace(self_attention=types.SimpleNamespace())
    inside = {
        "get_vit_layer_with_transformer_engine_spec": lambda: types.SimpleNamespace(
            submodules=attention
        ),
        "get_vision_model_config": lambda *_, **__: types.SimpleNamespace(),
        "Qwen3VLVisionModel": lambda *_, **__: _qwen3_tower(vision),
    }
    vars(module).update(inside)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    vars(config).update(
        image_token_id=IMAGE, video_token_id=-1, vision_start_token_id=-2, spatial_merge_size=2,
        use_hf_vision_model=False, should_pad_vocab=False, vocab_size=options["vocab_size"],
        language_max_sequence_length=options["max_sequence_length"], logit_dtype=None,
        rotary_percent=options["rotary_percent"], rotary_base=options["rotary_base"],
        fp16_lm_cross_entropy=False, vision_dp_when_cp=False,
        share_embeddings_and_output_weights=options["share_embeddings_and_output_weights"],
    )  # fmt: skip
    stages = {name: options[name] for name in ("pre_process", "post_process")}
    made = types.new_class("Made", (Whole, module.Qwen3VLModel))
    further = options.get("mtp_block_spec")
    return _older(typed(made(config, spec, vision, mtp_block_spec=further, **stages)))


def _older(model: Any) -> Any:
    """A model whose language model calls the newest Megatron-Core, for an older one."""
    inner = model.language_model
    for name in ("_postprocess", "_preprocess"):
        stock = getattr(inner, name)
        if "padding_mask" not in inspect.signature(stock).parameters:
            setattr(inner, name, _known_only(stock))
    return model


def _known_only(stock: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(stock).parameters
    return lambda **given: stock(**{name: given[name] for name in given if name in known})


def _qwen3_tower(vision: Any) -> Any:
    """transformers' tower, called and named as Megatron-Bridge's own."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel as Stock

    def forward(self: Any, hidden_states: Any, grid_thw: Any) -> Any:
        found = Stock.forward(self, hidden_states, grid_thw=grid_thw)
        return found.pooler_output, found.deepstack_features

    module = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model"
    own = {"__module__": module, "__qualname__": Stock.__name__, "forward": forward}
    made = types.new_class(Stock.__name__, (Stock,), {}, lambda space: space.update(own))
    tower = made._from_config(vision)  # type: ignore[attr-defined]
    for parameter in tower.parameters():  # as of other towers of transformers
        parameter.average_gradients_across_tp_domain = True
    return tower


class Whole:
    """What the harness gives its models, for one of Megatron-Bridge's; before its class."""

    def set_input_tensor(self, tensor: Any) -> None:
        """Of a list, as Megatron's schedules give it."""
        if not self.pre_process:  # type: ignore[attr-defined]
            self.language_model.set_input_tensor(tensor[0])  # type: ignore[attr-defined]


def omni(version: str, name: str, config: Any, spec: Any, **options: Any) -> Any:
    """Qwen2.5-Omni's ("25") or Qwen3-Omni's ("3") thinker, with its towers of images and sound."""
    from tests.harness.vision import IMAGE, WIDTH

    load()
    stand_in("megatron.bridge.utils.vocab_utils", calculate_padded_vocab_size=None)
    family = {"25": "qwen2_5_omni", "3": "qwen3_omni_moe"}[version]
    prefix = {"25": "Qwen2_5Omni", "3": "Qwen3OmniMoe"}[version]
    theirs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    own = {"fullatt_block_indexes": [1]} if version == "25" else {
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    vision = tower_config(
        getattr(theirs, f"{prefix}VisionEncoderConfig"), out_hidden_size=config.hidden_size, **own
    )
    heard = {"n_window": 4} if version == "25" else {"downsample_hidden_size": 8}
    audio = getattr(theirs, f"{prefix}AudioEncoderConfig")(
        num_mel_bins=WIDTH, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24,
        d_model=16, output_dim=config.hidden_size, attn_implementation="sdpa", **heard,
    )  # fmt: skip
    vars(config).update(
        image_token_id=IMAGE, video_token_id=-1, audio_token_id=SOUND, vision_start_token_id=-2,
        audio_start_token_id=SOUND - 1, position_id_per_seconds=25, seconds_per_chunk=2,
        spatial_merge_size=2, vocab_size=options["vocab_size"], logit_dtype=None,
        language_max_sequence_length=options["max_sequence_length"],
        rotary_percent=options["rotary_percent"], rotary_base=options["rotary_base"],
        fp16_lm_cross_entropy=False, multimodal_attn_impl="auto",
        share_embeddings_and_output_weights=options["share_embeddings_and_output_weights"],
    )  # fmt: skip
    path = f"megatron.bridge.models.qwen_omni.modeling_qwen{version}_omni.thinker_model"
    made = named(f"{path}.Qwen{version}OmniThinkerModel")
    if version == "3":  # newer transformers have it as a function
        tower = importlib.import_module(path).Qwen3OmniMoeAudioEncoderHF
        tower._get_feat_extract_output_lengths = _heard
    towers = types.SimpleNamespace(vision_config=vision, audio_config=audio)
    stages = {name: options[name] for name in ("pre_process", "post_process")}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    spec.submodules = types.SimpleNamespace(self_attention=types.SimpleNamespace())
    return _older(typed(made(config, spec, towers, pg_collection=groups, **stages)))


def _heard(_: Any, lengths: Any) -> Any:
    """Rows of a clip, as transformers' own function has them."""
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as theirs

    return None, theirs._get_feat_extract_output_lengths(lengths)


def nemotron(name: str, config: Any, spec: Any, **options: Any) -> Any:
    """Nemotron Omni, a hybrid model with RADIO's tower, of megatron-core 0.19 and newer."""
    from megatron.core import utils as core_utils
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

    from megatron_prefix.lab.models import hybrid
    from tests.harness.vision import IMAGE

    load()
    if core_utils.tex is None:
        core_utils.tex = types.SimpleNamespace(thd_get_partitioned_indices=_zigzag)
    inner, config.logit_dtype = config.model_spec, None
    pattern, stages = inner.hybrid_override_pattern, config.pipeline_model_parallel_size
    cuts = [len(pattern) * number // stages for number in range(stages + 1)]
    parts = [pattern[start:end] for start, end in itertools.pairwise(cuts)]
    behind = f"/{inner.mtp_hybrid_override_pattern}" * (inner.mtp_num_layers or 0)
    vision = _radio_config(config)
    projection = copy.deepcopy(vision)
    projection.hidden_size, projection.add_bias_linear = config.hidden_size, False
    tower = get_vit_layer_with_local_spec()
    tower.submodules.self_attention.submodules.core_attention = EachImage
    language = hybrid._local_stack(config, inner)
    made = named("megatron.bridge.models.nemotron_omni.modeling_nemotron_omni.NemotronOmniModel")
    model = made(
        language_transformer_config=config, language_transformer_layer_spec=language,
        language_vocab_size=options["vocab_size"], image_token_index=IMAGE, patch_dim=PATCH,
        language_max_sequence_length=options["max_sequence_length"],
        vision_transformer_config=vision, vision_transformer_layer_spec=tower,
        vision_projection_config=projection,
        vision_projection_layer_spec=tower.submodules.mlp.keywords["submodules"],
        language_position_embedding_type="none", hybrid_layer_pattern="|".join(parts) + behind,
        add_encoder=options["pre_process"], vision_class_token_len=2,
        radio_force_cpe_eval_mode=True, temporal_patch_dim=2, separate_video_embedder=True,
        **{name: options[name] for name in ("pre_process", "post_process")},
    )  # fmt: skip
    return typed(model)


def _radio_config(config: Any) -> Any:
    """That of a small tower, made of the language model's as Megatron-Bridge's provider does."""
    vision = copy.deepcopy(config)
    vars(vision).update(
        sequence_parallel=False, context_parallel_size=1, pipeline_model_parallel_size=1,
        num_layers=2, num_attention_heads=2, num_query_groups=2, hidden_size=32, kv_channels=16,
        ffn_hidden_size=48, gated_linear_unit=False, add_bias_linear=True, add_qkv_bias=True,
        activation_func=torch.nn.functional.gelu, normalization="LayerNorm", qk_layernorm=False,
        num_moe_experts=None, mtp_num_layers=None, is_hybrid_model=False,
        recompute_granularity=None,
    )  # fmt: skip
    return vision


def _zigzag(ends: Any, total: int, size: int, rank: int) -> Any:
    """transformer-engine's: which positions of a pack a context-parallel rank has."""
    return torch.from_numpy(cp_layout.held_positions(ends.diff().tolist(), rank, size))


class EachImage(torch.nn.Module):
    """Attention of a pack of images, each of which sees itself; called as Megatron's is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Any, k: Any, v: Any, *_: Any, packed_seq_params: Any, **__: Any) -> Any:
        q, k, v = (one.flatten(0, -3) for one in (q, k, v))
        return _each_image(q, k, v, packed_seq_params.cu_seqlens_q).flatten(1)


def _bridge(path: str, config: Any, spec: Any, options: dict[str, Any], kind: str) -> Any:
    """A whole model of Megatron-Bridge, whose config is the provider of its language model."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    def provide(**stage: Any) -> Any:
        stage.pop("vp_stage")
        given = {**options, **stage, "position_embedding_type": kind}
        return GPTModel(config, spec, scatter_embedding_sequence_parallel=False, **given)

    config.provide_language_model, config._pg_collection = provide, None
    config.share_embeddings_and_output_weights = options["share_embeddings_and_output_weights"]
    stages = {name: options[name] for name in ("pre_process", "post_process")}
    made = types.new_class("Made", (Whole, named(f"megatron.bridge.models.{path}")))
    return typed(made(config, **stages))


def qwen2_5(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl

    vision = tower_config(
        configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig, out_hidden_size=config.hidden_size,
        fullatt_block_indexes=[1], tokens_per_second=2,
    )  # fmt: skip
    return _bridge_of_images(
        "qwen_vl.modeling_qwen25_vl.Qwen25VLModel", config, spec, options, vision
    )


def glm4v(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.glm4v import configuration_glm4v

    vision = tower_config(configuration_glm4v.Glm4vVisionConfig, out_hidden_size=config.hidden_size)
    path = "glm_vl.modeling_glm_45v.GLM45VModel"
    model = _bridge_of_images(path, config, spec, options, vision)
    stock = model.forward

    def forward(input_ids: Any, **given: Any) -> Any:
        kinds = (input_ids == config.image_token_id).int()
        return stock(input_ids=input_ids, mm_token_type_ids=kinds, **given)

    model.forward = forward
    return model


def _bridge_of_images(
    path: str, config: Any, spec: Any, options: dict[str, Any], vision: Any
) -> Any:
    """One that makes positions itself, of tokens and grids."""
    from tests.harness.vision import IMAGE

    config.vision_config, config.image_token_id, config.video_token_id = vision, IMAGE, -1
    config.return_dict = True  # transformers' methods read it
    return _bridge(path, config, spec, options, "mrope")


def kimi(name: str, config: Any, spec: Any, **options: Any) -> Any:
    """Its tower's attention is a stand-in for flash-attention's."""
    from tests.harness.vision import IMAGE, WIDTH

    load()
    path, file = "kimi_vl.modeling_kimi_k25_vl", _kimi_file()
    bridge = importlib.import_module(f"megatron.bridge.models.{path}")
    bridge.get_class_from_dynamic_module = lambda full, *_, **__: getattr(
        file, full.partition(".")[2]
    )
    vision = types.SimpleNamespace(
        patch_size=(1, 2), init_pos_emb_height=4, init_pos_emb_width=4, init_pos_emb_time=4,
        pos_emb_type="divided_fixed", vt_num_attention_heads=2, vt_num_hidden_layers=2,
        vt_hidden_size=16, vt_intermediate_size=24, merge_kernel_size=(2, 2),
        video_attn_type="spatial_temporal", merge_type="sd2_tpool",
        _attn_implementation="eager", mm_projector_type="patchmerger", mm_hidden_size=16,
        text_hidden_size=config.hidden_size, projector_hidden_act="gelu", projector_ln_eps=1e-5,
    )  # fmt: skip
    stand_in(
        "megatron.bridge.models.hf_pretrained.safe_config_loader",
        safe_load_config_with_retry=lambda *_, **__: types.SimpleNamespace(vision_config=vision),
    )
    config.hf_model_path, config.trust_remote_code = "kimi", True
    config.media_placeholder_token_id, config.pad_token_id, config.ignore_index = IMAGE, -1, -100
    model = _bridge(f"{path}.KimiK25VLModel", config, spec, options, "rope")
    if model.pre_process:  # where flash-attention is installed
        model.vision_tower.config._attn_implementation = FLASH
        for block in model.vision_tower.encoder.blocks:
            block.attn_implementation = FLASH
    stock = model.forward

    def forward(position_ids: Any, pixel_values: Any = None, **given: Any) -> Any:
        if pixel_values is not None:  # of three colours
            pixels = torch.nn.functional.pad(pixel_values, (0, 6 - WIDTH))
            given["pixel_values"] = pixels.view(-1, 3, 1, 2)
        return stock(position_ids=position_ids[0], **given)

    model.forward = forward
    return model


@functools.cache
def _kimi_file() -> Any:
    """The file of Kimi's tower, imported as if it came with a checkpoint."""
    alone = types.SimpleNamespace(is_ulysses_enable=lambda: False, is_cp_enable=lambda: False)
    registers = types.SimpleNamespace(register=lambda _: lambda one: one)
    inside = {
        "loss.loss_func": {"build_loss_func": None},
        "models.base_model": {"WeightInitMixin": type("WeightInitMixin", (), {})},
        "models.kimik2_5.configuration_kimi_k25": {"KimiK25Config": None},
        "models.kimik2_5.modeling_deepseek": {
            "DeepseekV3ForCausalLM": object, "set_seq_len": lambda *_: None,
            "get_seq_len": lambda *_: None,
        },
        "utils.register": {"model_register": registers},
        "distributed.parallel_state": {"get_parallel_state": lambda: alone},
        "distributed.context_parallel.communication": dict.fromkeys(
            ("all_to_all", "gather_forward_split_backward",
             "packed_data_split_forward_gather_backward_with_cp")
        ),
        "distributed.context_parallel.utils": {"cal_split_sizes": None},
        "utils.device": {"IS_NPU_AVAILABLE": False},
    }  # fmt: skip
    for name, members in inside.items():
        stand_in(f"mindspeed_mm.fsdp.{name}", **members)
    spec = importlib.util.spec_from_file_location(REMOTE, SOURCES / KIMI)
    if spec is None or spec.loader is None:
        raise ImportError(f"no file {SOURCES / KIMI}")
    made = importlib.util.module_from_spec(spec)
    for name in ("transformers_modules", "transformers_modules.kimi"):
        stand_in(name)
    sys.modules[REMOTE] = made
    spec.loader.exec_module(made)
    made.flash_attn_varlen_func = _each_image  # type: ignore[attr-defined]
    return made


def _each_image(q: Any, k: Any, v: Any, ends: Any, *_: Any, **__: Any) -> Any:
    """flash-attention's of images one behind the other, [patches, heads, width]."""
    parts = [one.split(ends.diff().tolist()) for one in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    found = [attend(*(one.transpose(0, 1) for one in image)) for image in zip(*parts, strict=True)]
    return torch.cat([one.transpose(0, 1) for one in found])
