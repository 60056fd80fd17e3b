"""Files of trainers' sources, imported without what their packages import.

The folder `TRAINER_SOURCES` has exports of Megatron-Bridge, mbridge, mcore-bridge, MindSpeed-MM and
ROLL, each in a folder of that name; a check of this repository needs none of them.
"""

from __future__ import annotations

import ast
import functools
import importlib
import logging
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(os.environ.get("TRAINER_SOURCES", ""))
PACKAGES = {
    "megatron.bridge": "Megatron-Bridge/src/megatron/bridge",
    "mbridge": "mbridge/mbridge",
    "mcore_bridge": "mcore-bridge/src/mcore_bridge",
    "mcore_adapter": "ROLL/mcore_adapter/src/mcore_adapter",
}
_INSIDE = (
    "models", "models.qwen_vl", "models.qwen_vl.modelling_qwen3_vl", "training", "training.utils",
    "utils", "core", "models.qwen3_vl", "models.qwen2_5_vl", "models.qwen3_5", "models.glm4_vl",
    "models.glm_vl", "models.kimi_vl", "models.hf_pretrained", "model", "model.mm_gpts",
    "models.qwen2_vl", "models.qwen_omni", "models.qwen_omni.modeling_qwen25_omni",
    "models.qwen_omni.modeling_qwen3_omni", "models.nemotron_omni",
)  # fmt: skip


KIMI = "MindSpeed-MM/mindspeed_mm/fsdp/models/kimik2_5/modeling_kimi_k25.py"


def missing() -> str:
    """Why they cannot be built; "" if they can."""
    if "TRAINER_SOURCES" not in os.environ:
        return "TRAINER_SOURCES names no folder with the sources of vision-language models"
    gone = [one for one in (*PACKAGES.values(), KIMI) if not (SOURCES / one).exists()]
    return f"not in {SOURCES}: {', '.join(gone)}" if gone else ""


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
    if (SOURCES / PACKAGES["mcore_bridge"]).is_dir():
        _around_mcore_bridge()
    bridge = "megatron.bridge"
    stand_in(f"{bridge}.models.gpt_provider", GPTModelProvider=object)
    marking = "hook_hf_module_setattr_for_tp_grad_sync"
    stand_in(
        f"{bridge}.utils.common_utils",
        **{marking: function("megatron.bridge", "utils/common_utils", marking)},
    )


def _around_mcore_bridge() -> None:
    """What ms-swift's package imports of itself."""
    stand_in("mcore_bridge.bridge", MultimodalGPTBridge=None)
    stand_in("mcore_bridge.config", ModelConfig=object)
    cut = function("mcore_bridge", "utils/megatron_utils", "split_cp_inputs")
    stand_in(
        "mcore_bridge.utils", get_logger=logging.getLogger, safe_ddp_context=None,
        split_cp_inputs=cut,
    )  # fmt: skip
    registers = {"ModelMeta": lambda *_, **__: None, "register_model": lambda _: None}
    stand_in("mcore_bridge.model.register", ModelLoader=object, **registers)


def stand_in(name: str, **members: Any) -> None:
    """A module in the place of one that imports more than there is."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


def function(package: str, file: str, name: str, **known: Any) -> Callable[..., Any]:
    """A function of one of a package's files, without the rest of it; `known` are names there."""
    from megatron.core import mpu

    path = SOURCES / PACKAGES[package] / f"{file}.py"
    found = [
        one for one in ast.parse(path.read_text("utf-8")).body if getattr(one, "name", "") == name
    ]
    space: dict[str, Any] = {"torch": torch, "types": types, "mpu": mpu, **vars(typing), **known}
    exec(compile(ast.Module(found, []), str(path), "exec"), space)
    made: Callable[..., Any] = space[name]
    return made


def named(name: str) -> Any:
    load()
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def attending(spec: Any, attention: str) -> Any:
    """The spec of a block whose layers with attention have that of this name."""
    from megatron.core.transformer.attention import SelfAttention

    for layer in spec.layer_specs:
        if layer.submodules.self_attention.module is SelfAttention:
            layer.submodules.self_attention.module = named(attention)
    return spec


def tower_config(config: Any, **more: Any) -> Any:
    """A small config of a tower on patches of five numbers."""
    return config(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=1, in_channels=1,
        temporal_patch_size=5, spatial_merge_size=2, attn_implementation="sdpa", **more,
    )  # fmt: skip


def typed(model: Any) -> Any:
    from megatron.core.enums import ModelType

    model.model_type = ModelType.encoder_or_decoder
    return model
