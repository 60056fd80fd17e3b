"""Vision-language models of trainers, built small on the CPU from their own sources.

The folder `TRAINER_SOURCES` has exports of Megatron-Bridge and mbridge, each in a folder
of that name.  Only the files of a model are imported, not what their packages import.
Where a whole model needs a GPU, its language model stands in the harness's model, which calls it as
the real one does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCES = Path(os.environ.get("TRAINER_SOURCES", ""))
PACKAGES = {
    "megatron.bridge": "Megatron-Bridge/src/megatron/bridge",
    "mbridge": "mbridge/mbridge",
}
_INSIDE = (
    "models", "models.qwen_vl", "models.qwen_vl.modelling_qwen3_vl", "training", "training.utils",
    "utils", "core", "models.qwen3_vl", "models.qwen2_5_vl", "models.qwen3_5", "models.glm4_vl",
)  # fmt: skip


def missing() -> str:
    """Why none of them can be built; "" if they can."""
    if "TRAINER_SOURCES" not in os.environ:
        return "TRAINER_SOURCES names no folder with Megatron-Bridge and mbridge"
    for folder in PACKAGES.values():
        if not (SOURCES / folder).is_dir():
            return f"no folder {SOURCES / folder}"
    return ""


@functools.cache
def load() -> None:
    """Makes their files importable: packages without what their __init__ imports."""
    for package, folder in PACKAGES.items():
        for name in ("", *_INSIDE):
            path = SOURCES / folder / name.replace(".", "/")
            if path.is_dir():
                made = types.ModuleType(f"{package}.{name}".rstrip("."))
                made.__path__ = [str(path)]
                sys.modules[made.__name__] = made


def _named(name: str) -> Any:
    load()
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _tower(config: Any, **more: Any) -> Any:
    """A small config of a tower on patches of five numbers."""
    return config(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=1, in_channels=1,
        temporal_patch_size=5, spatial_merge_size=2, attn_implementation="sdpa", **more,
    )  # fmt: skip


def _attending(spec: Any, attention: str) -> Any:
    for layer in spec.layer_specs:
        layer.submodules.self_attention.module = _named(attention)
    return spec


def _bridge_qwen3(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from tests.harness.vision import Showing

    inside = _named("megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model.Qwen3VLGPTModel")
    model = Showing(name, config, spec, inside, **options)
    stock = model.language_model._postprocess
    known = inspect.signature(stock).parameters

    def postprocess(**given: Any) -> Any:  # arguments of the newest Megatron-Core
        return stock(**{name: value for name, value in given.items() if name in known})

    model.language_model._postprocess = postprocess
    return model


def _mbridge_qwen3(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from tests.harness.vision import VisionLanguage

    config.apply_rotary_pos_emb_in_fp32 = False
    spec = _attending(spec, "mbridge.models.qwen3_vl.attention.Qwen3VLSelfAttention")
    inside = _named("mbridge.models.qwen3_vl.gpt_model.Qwen3VLGPTModel")
    return VisionLanguage(name, config, spec, inside, **options)


def _mbridge_qwen3_5(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    from tests.harness.vision import IMAGE

    config.apply_rotary_pos_emb_in_fp32, config.spatial_merge_size = False, 2
    vision = _tower(
        configuration_qwen3_5.Qwen3_5VisionConfig, out_hidden_size=config.hidden_size,
        num_position_embeddings=64,
    )  # fmt: skip
    model = _named("mbridge.models.qwen3_5.model.Qwen3_5VLModel")(
        config, spec, options["vocab_size"], options["max_sequence_length"],
        types.SimpleNamespace(vision_config=vision), modeling_qwen3_5.Qwen3_5VisionModel,
        pre_process=options["pre_process"], post_process=options["post_process"],
        language_rotary_base=options["rotary_base"], image_token_id=IMAGE,
    )  # fmt: skip
    return _typed(model)


def _mbridge_glm4v(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.glm4v import configuration_glm4v, modeling_glm4v

    from tests.harness.vision import IMAGE

    config.spatial_merge_size, config.image_token_id, config.video_token_id = 2, IMAGE, -1
    vision = _tower(configuration_glm4v.Glm4vVisionConfig, out_hidden_size=config.hidden_size)
    known = types.SimpleNamespace(vision_config=vision, image_token_id=IMAGE, video_token_id=-1)
    model = _named("mbridge.models.glm4_vl.model.Glm4VLModel")(
        config, spec, options["vocab_size"], options["max_sequence_length"], "mrope", known,
        modeling_glm4v.Glm4vVisionModel, pre_process=options["pre_process"],
        post_process=options["post_process"], rotary_base=options["rotary_base"],
    )  # fmt: skip
    stock = model.vision_model

    def features(pixels: Any, grids: Any) -> Any:  # transformers returns more than it did
        return stock(pixels, grid_thw=grids).pooler_output.split((grids.prod(-1) // 4).tolist())

    model.get_image_features = features
    return _typed(model)


def _typed(model: Any) -> Any:
    from megatron.core.enums import ModelType

    model.model_type = ModelType.encoder_or_decoder
    return model


MODELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "Megatron-Bridge, Qwen3-VL's language model": ("Megatron-Bridge, Qwen3-VL", _bridge_qwen3),
    "mbridge, Qwen3-VL's language model": ("mbridge, Qwen3-VL", _mbridge_qwen3),
    "mbridge, Qwen3.5": ("mbridge, GLM-4V", _mbridge_qwen3_5),
    "mbridge, GLM-4V": ("mbridge, GLM-4V", _mbridge_glm4v),
}
"""By name: how they call their language model (tests/harness/vision.py), and what builds them."""
