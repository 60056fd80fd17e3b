"""Vision-language models of trainers that are built from their own sources, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.trainers import vision_bridge, vision_mbridge, vision_roll
from tests.harness import hybrid


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
        alone: with context parallelism a call has one sample.
        rows: calls are rows in every layout.
        shares: tensor- and context-parallel ranks share the images of a call, and its tower is
            frozen there, as it is refused otherwise.
        heard: it wants sound or pixels, which nemo_rl_images_steps.py alone gives it.
        further: the first release of Megatron-Core with which its multi-token prediction runs; "":
            it has none.
    """

    kind: str
    make: Callable[..., Any]
    spec: str = "tiny-qwen3"
    build: Mapping[str, Any] = MappingProxyType({})
    cuts_labels: bool = False
    splits: bool = False
    takes_cp: bool = True
    alone: bool = False
    rows: bool = False
    shares: bool = False
    heard: bool = False
    further: str = ""


BY_WORD = {
    "qwen2": "Qwen2.5-VL", "qwen3": "Qwen3-VL", "qwen35": "Qwen3.5", "omni2": "Qwen2.5-Omni",
    "omni3": "Qwen3-Omni", "nemotron": "Nemotron Omni",
}  # fmt: skip
"""Megatron-Bridge's models, by the words for them in layouts' names of run_sources.py."""
PLAIN = "Megatron-Bridge, Qwen2.5-VL"
MODELS = {
    "Megatron-Bridge, Qwen3-VL": Model(
        "Megatron-Bridge, Qwen3-VL", vision_bridge.qwen3,
        build={"calculate_per_token_loss": True}, cuts_labels=True, further="0.18",
    ),
    "Megatron-Bridge, Qwen3.5": Model(
        "Megatron-Bridge, Qwen3-VL", vision_bridge.qwen3, hybrid.GDN,
        {"num_layers": 4, "calculate_per_token_loss": True},
        cuts_labels=True, rows=True, takes_cp=False,  # its layers do, from megatron-core 0.18 on
        further="0.18",
    ),
    "Megatron-Bridge, Qwen2.5-VL": Model(PLAIN, vision_bridge.qwen2_5, takes_cp=False),
    "Megatron-Bridge, Qwen2.5-Omni": Model(
        "Megatron-Bridge, Qwen3-VL", partial(vision_bridge.omni, "25"), heard=True
    ),
    "Megatron-Bridge, Qwen3-Omni": Model(
        "Megatron-Bridge, Qwen3-VL", partial(vision_bridge.omni, "3"), heard=True
    ),
    "Megatron-Bridge, Nemotron Omni": Model(
        "Megatron-Bridge, Qwen2.5-VL", vision_bridge.nemotron, "tiny-nemotron-h",
        {"num_layers": 4}, heard=True,
    ),
    "Megatron-Bridge, GLM-4.5V": Model(PLAIN, vision_bridge.glm4v, takes_cp=False),
    "Megatron-Bridge, Kimi-K2.5": Model(
        PLAIN, vision_bridge.kimi, "tiny-deepseek",
        # A step changes the next one by its routers' bias.
        {"num_layers": 4, "moe_router_enable_expert_bias": False},
        cuts_labels=True,
    ),
    "mcore-bridge, Qwen3-VL": Model(
        "mcore-bridge, Qwen3-VL", vision_mbridge.mcore_qwen3, alone=True
    ),
    "mbridge, Qwen2.5-VL's language model": Model(PLAIN, vision_mbridge.qwen2_5),
    "mbridge, Qwen3-VL's language model": Model("mbridge, Qwen3-VL", vision_mbridge.qwen3),
    "mbridge, Qwen3.5": Model(
        "mbridge, GLM-4V", vision_mbridge.qwen3_5, splits=True, further="0.16"
    ),
    "mbridge, GLM-4V": Model("mbridge, GLM-4V", vision_mbridge.glm4v, takes_cp=False),
    "ROLL, Qwen2-VL": Model(PLAIN, vision_roll.qwen2, shares=True, rows=True),
    "ROLL, Qwen2.5-VL": Model(PLAIN, vision_roll.qwen2_5, shares=True, rows=True),
    "ROLL, Qwen3-VL": Model("mbridge, Qwen3-VL", vision_roll.qwen3, shares=True, rows=True),
}  # fmt: skip
