"""Vision-language models: the classes that trainers build them of, and how they call their parts.

The language model is the module that owns the decoder (install.py); a class of its own has a
forward of its own, and a line here if that gives every position to the decoder as Megatron's does.
A model may be its own language model: its forward makes embeddings, and calls its parent class's.
Rotary tables are made by the model from the positions that it is called with, so a class is in
`ROTARY` if a row of its table depends on that position's numbers alone.  [pure]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_prefix.layers.kind import owner

_BRIDGE = "megatron.bridge.models"
_QWEN3 = f"{_BRIDGE}.qwen_vl.modelling_qwen3_vl"


class Family(NamedTuple):
    """A class of language model with a forward of its own.

    Attributes:
        forward: the class that defines it.
        used_by: what it belongs to.
        positions_first: the mask of images' positions is [positions, samples] instead of [samples,
            positions].
        tower: the model's own attribute that is its vision tower, if it is its own language model;
            "": another model is around it.
    """

    forward: str
    used_by: str
    positions_first: bool = False
    tower: str = ""


_ROLL = "mcore_adapter.models"
FAMILIES = (
    Family(f"{_QWEN3}.text_model.Qwen3VLGPTModel", "Megatron-Bridge's Qwen3-VL and Qwen3.5"),
    Family("mbridge.models.qwen3_vl.gpt_model.Qwen3VLGPTModel", "mbridge's Qwen3-VL"),
    Family("mcore_bridge.model.gpt_model.GPTModel", "ms-swift's models", positions_first=True),
    Family(
        f"{_ROLL}.qwen2_vl.modeling_qwen2_vl.Qwen2VLModel", "ROLL's Qwen2-VL", tower="vision_model"
    ),
    Family(
        f"{_ROLL}.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel", "ROLL's Qwen2.5-VL",
        tower="vision_model",
    ),
    Family(
        f"{_ROLL}.qwen3_vl.modeling_qwen3_vl.Qwen3VLModel", "ROLL's Qwen3-VL, with experts, too",
        tower="vision_model",
    ),
)  # fmt: skip
"""Another class adds its line; those with Megatron's own GPTModel inside need none."""
ROTARY = {
    "megatron.core.models.common.embeddings.rotary_pos_embedding.MultimodalRotaryEmbedding",
    f"{_QWEN3}.rope.Qwen3VLMultimodalRotaryEmbedding",
    "mbridge.models.qwen3_vl.rope_utils.Qwen3VLMultimodalRotaryEmbedding",
    "mbridge.models.qwen3_5.rope_utils.Qwen3VLMultimodalRotaryEmbedding",
    f"{_ROLL}.qwen3_vl.rope_utils.Qwen3VLMultimodalRotaryEmbedding",
}
"""Classes of rotary embeddings that are called with three positions a token."""
_HF = "transformers.models"
_REMOTE = "transformers_modules"
"""Where transformers puts code that comes with a checkpoint."""


class Tower(NamedTuple):
    """A class of vision tower, and how it is called.

    Attributes:
        forward: the class that defines it.
        grids: its argument of the images' grids.
        apart: whether frames of a video see themselves alone: [t, h, w] is t images.
        listed: whether it returns a list with the rows of every image.
        needs: its `_attn_implementation`, if with another one images see one another.
    """

    forward: str
    grids: str = "grid_thw"
    apart: bool = True
    listed: bool = False
    needs: str = ""


_OF_IMAGES = (
    f"{_HF}.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel",
    f"{_HF}.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
    f"{_HF}.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel",
    f"{_HF}.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel",
    f"{_HF}.qwen3_5.modeling_qwen3_5.Qwen3_5VisionModel",
    f"{_HF}.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeVisionModel",
    f"{_HF}.glm4v.modeling_glm4v.Glm4vVisionModel",
    f"{_HF}.glm4v_moe.modeling_glm4v_moe.Glm4vMoeVisionModel",
    f"{_QWEN3}.vision_model.Qwen3VLVisionModel",
    "mbridge.models.qwen2_5_vl.vision_model.Qwen2_5VisionModel",
    "mbridge.models.qwen3_vl.vision_model.Qwen3VLVisionModel",
)
TOWERS = {
    **{name: Tower(name) for name in _OF_IMAGES},
    # Kimi-K2.5, of Megatron-Bridge: its eager attention adds 1 to scores inside an image, and
    # leaves the others.
    f"{_REMOTE}.modeling_kimi_k25.MoonViT3dPretrainedModel": Tower(
        f"{_REMOTE}.modeling_kimi_k25.MoonViT3dPretrainedModel",
        grids="grid_thws", apart=False, listed=True, needs="flash_attention_2",
    ),
}  # fmt: skip
"""Classes of vision towers that are called with patches and grids of images, and in which an image
sees itself alone; they run once an image unless they drop anything at random, others once a
call."""
SPLIT_IMAGES = {
    "mbridge.models.qwen3_vl.model.Qwen3VLModel",
    "mbridge.models.qwen3_5.model.Qwen3_5VLModel",
}
"""Models whose context-parallel ranks share the images of a call, and do not add up what their rows
send to these (`AllGatherVisionEmbeddings` in mbridge's core utilities)."""
_SET_BY = {"mrope_forward_thd_cp": "mbridge.models.qwen2_5_vl.rope_utils"}
"""Functions that models set as the forward of such a module, and where they are from."""


def family(model: Any) -> Family | None:
    """A language model's line of the table; None for Megatron's own classes, and unknown ones."""
    found = owner_of_class(model)
    return next((one for one in FAMILIES if one.forward == found), None)


def owner_of_class(model: Any) -> str:
    """The class that defines a model's forward, whatever its instance has at the moment."""
    base = defining_class(model)
    if base is None:
        return ""
    module = base.__module__
    if module.startswith(f"{_REMOTE}."):  # without the checkpoint's name and revision
        module = f"{_REMOTE}.{module.rpartition('.')[2]}"
    return f"{module}.{base.__qualname__}"


def defining_class(model: Any) -> type | None:
    """See `owner_of_class`."""
    return next((base for base in type(model).__mro__ if "forward" in vars(base)), None)


def calls_parent(model: Any) -> type | None:
    """The class whose forward calls its parent's for the language model; None if it is that of the
    language model itself."""
    found = family(model)
    return defining_class(model) if found is not None and found.tower else None


def own_tower(model: Any) -> Any:
    """The vision tower that a language model has itself; None without one."""
    found = family(model)
    return getattr(model, found.tower, None) if found is not None and found.tower else None


def tower(module: Any) -> Tower | None:
    """A vision tower's line of the table; None if what an image's rows depend on is not known, or
    chance."""
    found = TOWERS.get(owner_of_class(module))
    if found is None or drops(module):
        return None
    attention = getattr(module.__dict__.get("config"), "_attn_implementation", None)
    return found if found.needs in ("", attention) else None


def positions_first(model: Any) -> bool:
    """See `Family`."""
    found = family(model)
    return found is not None and found.positions_first


def around(model: Any, inner: Any) -> Iterator[Any]:
    """Modules of a model chunk that are not inside its language model, `inner`; or are its own
    tower's."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module is not inner:
            yield module
            waiting += reversed([*module.children()])
        elif (tower := own_tower(inner)) is not None:
            waiting.append(tower)


def drops(tower: Any) -> bool:
    """Whether a vision tower drops anything at random, so that its next forward may be another."""
    for module in (one for one in tower.modules() if one.training):
        if "Dropout" in type(module).__name__ and getattr(module, "p", None):
            return True
        own = vars(module) | getattr(module.__dict__.get("config"), "__dict__", {})
        if any("drop" in name and isinstance(p, float) and p > 0 for name, p in own.items()):
            return True
    return False


def has_images(model: Any, inner: Any) -> bool:
    """Whether a model chunk is of a vision-language model, whose language model is `inner`."""
    known = TOWERS.keys() | SPLIT_IMAGES
    return is_multimodal(inner) or any(owner_of_class(one) in known for one in around(model, inner))


def is_multimodal(model: Any) -> bool:
    """Whether a language model's rotary table is made from three positions a token."""
    attends = not getattr(model.config, "multi_latent_attention", False)
    return attends and getattr(model, "position_embedding_type", "") == "mrope"


def length_scaling(model: Any) -> str | None:
    """The rope_type by which a model makes its rotary table anew for the length of every call
    (ms-swift's, of Hugging Face's configs); None: it does not."""
    kind = (getattr(model, "hf_rope_scaling", None) or {}).get("rope_type")
    return kind if kind in ("dynamic", "longrope") else None


def knows_rotary(module: Any) -> bool:
    """Whether a rotary embedding is one of `ROTARY`."""
    set_by_model = vars(module).get("forward")
    if set_by_model is None:
        return owner(module, "forward") in ROTARY
    function = getattr(set_by_model, "__func__", set_by_model)
    name = getattr(function, "__name__", "")
    if _SET_BY.get(name, "") == getattr(function, "__module__", ""):
        return True
    # Its own again (mbridge's Qwen2.5-VL puts it back for rows).
    return any(vars(base).get("forward") is function for base in type(module).__mro__)
