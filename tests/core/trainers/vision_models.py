"""Vision-language models of trainers, built small on the CPU from their own sources.

The folder `TRAINER_SOURCES` has exports of Megatron-Bridge and mbridge, each in a folder
of that name.  Only the files of a model are imported, not what their packages import.
Where a whole model needs a GPU, its language model stands in the harness's model, which calls it as
the real one does.  Kimi's tower comes with its checkpoint; MindSpeed-MM has a copy of that file,
with lines of its own for other devices and for parallelism, neither of which run here.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

SOURCES = Path(os.environ.get("TRAINER_SOURCES", ""))
PACKAGES = {
    "megatron.bridge": "Megatron-Bridge/src/megatron/bridge",
    "mbridge": "mbridge/mbridge",
}
_INSIDE = (
    "models", "models.qwen_vl", "models.qwen_vl.modelling_qwen3_vl", "training", "training.utils",
    "utils", "core", "models.qwen3_vl", "models.qwen2_5_vl", "models.qwen3_5", "models.glm4_vl",
    "models.glm_vl", "models.kimi_vl", "models.hf_pretrained",
)  # fmt: skip
KIMI = "MindSpeed-MM/mindspeed_mm/fsdp/models/kimik2_5/modeling_kimi_k25.py"
REMOTE = "transformers_modules.kimi.modeling_kimi_k25"
"""The name that transformers gives to such a file."""
FLASH = "flash_attention_2"


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
    bridge = "megatron.bridge"
    _stand_in(f"{bridge}.models.gpt_provider", GPTModelProvider=object)
    marking = "hook_hf_module_setattr_for_tp_grad_sync"
    _stand_in(f"{bridge}.utils.common_utils", **{marking: _function("utils/common_utils", marking)})


def _stand_in(name: str, **members: Any) -> None:
    """A module in the place of one that imports more than there is."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


def _function(file: str, name: str) -> Callable[..., Any]:
    """A function of one of Megatron-Bridge's files, without the rest of it."""
    path = SOURCES / PACKAGES["megatron.bridge"] / f"{file}.py"
    found = [
        one for one in ast.parse(path.read_text("utf-8")).body if getattr(one, "name", "") == name
    ]
    space: dict[str, Any] = {"torch": torch, "types": types}
    exec(compile(ast.Module(found, []), str(path), "exec"), space)
    made: Callable[..., Any] = space[name]
    return made


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


class Whole:
    """What the harness gives its models, for one of Megatron-Bridge's; before its class."""

    def set_input_tensor(self, tensor: Any) -> None:
        """Of a list, as Megatron's schedules give it."""
        if not self.pre_process:  # type: ignore[attr-defined]
            self.language_model.set_input_tensor(tensor[0])  # type: ignore[attr-defined]


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
    made = types.new_class("Made", (Whole, _named(f"megatron.bridge.models.{path}")))
    return _typed(made(config, **stages))


def _bridge_qwen2_5(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl

    vision = _tower(
        configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig, out_hidden_size=config.hidden_size,
        fullatt_block_indexes=[1], tokens_per_second=2,
    )  # fmt: skip
    return _bridge_of_images(
        "qwen_vl.modeling_qwen25_vl.Qwen25VLModel", config, spec, options, vision
    )


def _bridge_glm4v(name: str, config: Any, spec: Any, **options: Any) -> Any:
    from transformers.models.glm4v import configuration_glm4v

    vision = _tower(configuration_glm4v.Glm4vVisionConfig, out_hidden_size=config.hidden_size)
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


def _bridge_kimi(name: str, config: Any, spec: Any, **options: Any) -> Any:
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
    _stand_in(
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
        _stand_in(f"mindspeed_mm.fsdp.{name}", **members)
    spec = importlib.util.spec_from_file_location(REMOTE, SOURCES / KIMI)
    if spec is None or spec.loader is None:
        raise ImportError(f"no file {SOURCES / KIMI}")
    made = importlib.util.module_from_spec(spec)
    for name in ("transformers_modules", "transformers_modules.kimi"):
        _stand_in(name)
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


def _typed(model: Any) -> Any:
    from megatron.core.enums import ModelType

    model.model_type = ModelType.encoder_or_decoder
    return model


class Model(NamedTuple):
    """A model of a trainer.

    Attributes:
        kind: how it calls its language model (tests/harness/vision.py).
        make: builds it.
        spec: name of its language model's.
        build: options of it.
        cuts_labels: see tests/harness/vision.py, `Trainer`.
        splits: its tensor- and context-parallel ranks share the images of a call.
        takes_cp: whether it takes context parallelism itself.
    """

    kind: str
    make: Callable[..., Any]
    spec: str = "tiny-qwen3"
    build: Mapping[str, Any] = MappingProxyType({})
    cuts_labels: bool = False
    splits: bool = False
    takes_cp: bool = True


PLAIN = "Megatron-Bridge, Qwen2.5-VL"
MODELS = {
    "Megatron-Bridge, Qwen3-VL's language model": Model(
        "Megatron-Bridge, Qwen3-VL", _bridge_qwen3
    ),
    "Megatron-Bridge, Qwen2.5-VL": Model(PLAIN, _bridge_qwen2_5, takes_cp=False),
    "Megatron-Bridge, GLM-4.5V": Model(PLAIN, _bridge_glm4v, takes_cp=False),
    "Megatron-Bridge, Kimi-K2.5": Model(
        PLAIN, _bridge_kimi, "tiny-deepseek",
        # A step changes the next one by its routers' bias.
        {"num_layers": 4, "moe_router_enable_expert_bias": False},
        cuts_labels=True,
    ),
    "mbridge, Qwen3-VL's language model": Model("mbridge, Qwen3-VL", _mbridge_qwen3),
    "mbridge, Qwen3.5": Model("mbridge, GLM-4V", _mbridge_qwen3_5, splits=True),
    "mbridge, GLM-4V": Model("mbridge, GLM-4V", _mbridge_glm4v, takes_cp=False),
}  # fmt: skip
