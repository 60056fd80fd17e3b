"""Vision-language models of mbridge (verl) and mcore-bridge (ms-swift), built small on the CPU from
their own sources.

The towers of mbridge's Qwen2.5-VL and Qwen3-VL need a GPU, so their language models stand in the
harness's model.
"""

from __future__ import annotations

import functools
import types
from typing import Any
from unittest import mock

import torch

from benchmarks.trainers.vision_sources import attending, function, named, tower_config, typed


def qwen3(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from tests.harness.vision import VisionLanguage

    config.apply_rotary_pos_emb_in_fp32 = False
    spec = attending(spec, "mbridge.models.qwen3_vl.attention.Qwen3VLSelfAttention")
    inside = named("mbridge.models.qwen3_vl.gpt_model.Qwen3VLGPTModel")
    return VisionLanguage(name, config, spec, inside, **options)


def qwen2_5(name: str, config: Any, spec: Any, **options: Any) -> Any:
    """Its rotary embedding has another forward for packs, which each call puts there."""
    from tests.harness.vision import VisionLanguage

    path = "mbridge.models.qwen2_5_vl"
    spec = attending(spec, f"{path}.attention.Qwen2_5VLSelfAttention")
    model = VisionLanguage(name, config, spec, **options)
    rotary, forward = model.language_model.rotary_pos_emb, model.forward
    of_rows, of_packs = rotary.forward, named(f"{path}.rope_utils.mrope_forward_thd_cp")

    def with_its_own(*args: Any, **given: Any) -> Any:
        packed = given.get("packed_seq_params") is not None
        rotary.forward = types.MethodType(of_packs, rotary) if packed else of_rows
        return forward(*args, **given)

    model.forward = with_its_own
    return model


def qwen3_5(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    from tests.harness.vision import IMAGE

    config.apply_rotary_pos_emb_in_fp32, config.spatial_merge_size = False, 2
    vision = tower_config(
        configuration_qwen3_5.Qwen3_5VisionConfig, out_hidden_size=config.hidden_size,
        num_position_embeddings=64,
    )  # fmt: skip
    model = named("mbridge.models.qwen3_5.model.Qwen3_5VLModel")(
        config, spec, options["vocab_size"], options["max_sequence_length"],
        types.SimpleNamespace(vision_config=vision), modeling_qwen3_5.Qwen3_5VisionModel,
        pre_process=options["pre_process"], post_process=options["post_process"],
        language_rotary_base=options["rotary_base"], image_token_id=IMAGE,
        language_mtp_block_spec=options.get("mtp_block_spec"),
    )  # fmt: skip
    return typed(model)


def glm4v(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.glm4v import configuration_glm4v, modeling_glm4v

    from tests.harness.vision import IMAGE

    config.spatial_merge_size, config.image_token_id, config.video_token_id = 2, IMAGE, -1
    vision = tower_config(configuration_glm4v.Glm4vVisionConfig, out_hidden_size=config.hidden_size)
    known = types.SimpleNamespace(vision_config=vision, image_token_id=IMAGE, video_token_id=-1)
    model = named("mbridge.models.glm4_vl.model.Glm4VLModel")(
        config, spec, options["vocab_size"], options["max_sequence_length"], "mrope", known,
        modeling_glm4v.Glm4vVisionModel, pre_process=options["pre_process"],
        post_process=options["post_process"], rotary_base=options["rotary_base"],
    )  # fmt: skip
    stock = model.vision_model

    def features(pixels: Any, grids: Any) -> Any:  # transformers returns more than it did
        return stock(pixels, grid_thw=grids).pooler_output.split((grids.prod(-1) // 4).tolist())

    model.get_image_features = features
    return typed(model)


def mcore_qwen3(name: str, config: Any, spec: Any, **options: Any) -> Any:
    """ms-swift's, which cuts positions for context-parallel ranks before it calls the model."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt import gpt_model

    from megatron_prefix.tree import cp_layout

    path = "mcore_bridge.model.mm_gpts.qwen3_vl"
    tower = types.new_class("Vit", (named(f"{path}.Qwen3VL_Vit"),))
    tower.to = lambda self, *_, **__: self  # type: ignore[attr-defined]  # to a GPU
    vars(config).update(_mcore_fields(config, tower, options))
    block, turn = named(f"{path}.Qwen3VLTransformerBlock"), "_apply_rotary_pos_emb_bshd"
    stock = getattr(rope_utils, turn)
    with mock.patch.object(gpt_model, "TransformerBlock", block):
        model = named("mcore_bridge.model.mm_gpt_model.MultimodalGPTModel")(
            config, spec, options["pre_process"], options["post_process"]
        )
    setattr(rope_utils, turn, stock)  # what it has put there is the same, without scaling
    vars(rope_utils).pop(f"_origin{turn}", None)
    model.language_model.rotary_pos_emb.__class__ = _rotary()
    forward, cp = model.forward, parallel_state.get_context_parallel_group()

    def cut(input_ids: Any, position_ids: Any, **given: Any) -> Any:
        held = cp_layout.rank_positions(input_ids.shape[1], cp.rank(), cp.size())
        return forward(input_ids, position_ids[..., torch.from_numpy(held)], **given)

    model.forward = cut
    return typed(model)


def _mcore_fields(config: Any, tower: type, options: dict[str, Any]) -> dict[str, Any]:
    """What a config of mcore-bridge has besides Megatron's."""
    from transformers.models.qwen3_vl import configuration_qwen3_vl

    from tests.harness.vision import IMAGE

    vision = tower_config(
        configuration_qwen3_vl.Qwen3VLVisionConfig, out_hidden_size=config.hidden_size,
        num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
    )  # fmt: skip
    known = types.SimpleNamespace(vision_config=vision, image_token_id=IMAGE, video_token_id=-1)
    return dict(
        hf_config=known, hf_model_type="qwen3_vl", vit_attn_impl=None, task_type="causal_lm",
        model_meta=types.SimpleNamespace(visual_cls=tower), is_multimodal=True,
        mrope_interleaved=True, rope_scaling=None, rotary_base=options["rotary_base"],
        partial_rotary_factor=None, original_max_position_embeddings=None,
        max_position_embeddings=options["max_sequence_length"],
        padded_vocab_size=options["vocab_size"], position_embedding_type="mrope",
        untie_embeddings_and_output_weights=not options["share_embeddings_and_output_weights"],
    )  # fmt: skip


@functools.cache
def _rotary() -> type:
    """Megatron's class of rotary embedding, as mcore-bridge leaves it: with a forward of its own.
    Other models here have Megatron's, so it is put into a class of that name."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.embeddings.rotary_pos_embedding import (
        MultimodalRotaryEmbedding as Stock,
    )

    own = {"__module__": Stock.__module__, "__qualname__": Stock.__qualname__}
    made = types.new_class(Stock.__name__, (Stock,), {}, lambda space: space.update(own))
    apart = types.SimpleNamespace(**vars(rope_utils))
    names = {"MultimodalRotaryEmbedding": made, "rope_utils": apart}
    function("mcore_bridge", "patcher", "_patch_mrope", **names)()
    return made
