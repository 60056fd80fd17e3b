"""Vision-language models of ROLL, built small on the CPU from their own sources, with the towers of
transformers that they have.  Each is its own language model."""

from __future__ import annotations

import functools
import types
from typing import Any
from unittest import mock

import torch

from benchmarks.trainers.vision_sources import named, tower_config, typed


def qwen2(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.qwen2_vl import configuration_qwen2_vl

    vision = tower_config(
        configuration_qwen2_vl.Qwen2VLVisionConfig, embed_dim=32, mlp_ratio=2,
    )  # fmt: skip
    vision.hidden_size = config.hidden_size  # of what it returns
    return _made("qwen2_vl.modeling_qwen2_vl.Qwen2VLModel", config, spec, options, vision)


def qwen2_5(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl

    vision = tower_config(
        configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig, out_hidden_size=config.hidden_size,
        fullatt_block_indexes=[1], tokens_per_second=2,
    )  # fmt: skip
    return _made("qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel", config, spec, options, vision)


def qwen3(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.qwen3_vl import configuration_qwen3_vl

    vision = tower_config(
        configuration_qwen3_vl.Qwen3VLVisionConfig, out_hidden_size=config.hidden_size,
        num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
    )  # fmt: skip
    return _made("qwen3_vl.modeling_qwen3_vl.Qwen3VLModel", config, spec, options, vision)


def _made(path: str, config: Any, spec: Any, options: dict[str, Any], vision: Any) -> Any:
    """A model of ROLL, with the harness's layers, called as ROLL's strategy calls it."""
    from tests.harness.vision import IMAGE, WIDTH

    vars(config).update(
        vision_config=vision.to_dict(), merge_size=2, pixel_values_dim=WIDTH,
        image_token_id=IMAGE, video_token_id=-1, vision_start_token_id=-2, tokens_per_second=2,
        padded_vocab_size=options["vocab_size"], init_model_with_meta_device=False,
        max_sequence_length=options["max_sequence_length"], position_embedding_type="mrope",
        tie_embeddings_and_output_weights=options["share_embeddings_and_output_weights"],
        rotary_percent=options["rotary_percent"], rotary_base=options["rotary_base"],
        rotary_scaling=False, rotary_scaling_factor=8.0, transformer_impl="local",
        use_cpu_initialization=True,
    )  # fmt: skip
    stages = {name: options[name] for name in ("pre_process", "post_process")}
    found = named(f"mcore_adapter.models.{path}")
    made = types.new_class("Made", (Whole, found), {}, lambda space: space.update(spec=spec))
    with mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
        model = typed(made(config, vp_stage=0, **stages))
    model.forward = functools.partial(model.forward, force_vit_image=True)
    return model


class Whole:
    """What the harness asks its models, for one of ROLL's; before its class."""

    spec: Any = None

    def _get_transformer_layer_spec(self, config: Any = None) -> Any:
        return self.spec

    @property
    def language_model(self) -> Any:
        """The same."""
        return self
