"""Vision-language models: the classes that trainers build them of, and how they call their parts.

Rotary tables are made by the model from the positions that it is called with, so a class is in
`ROTARY` if a row of its table depends on that position's numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from megatron_prefix.errors import Reason
from megatron_prefix.features.vision.forms import Clips, Images, Pixels
from megatron_prefix.layers.kind import owner
from megatron_prefix.megatron.families import calls_parent, forward_owner, has_mrope
from megatron_prefix.megatron.install import language_model
from megatron_prefix.refusals.table import IMAGES_OF_RANKS, OTHER_ROTARY, SPLIT_IMAGES

_QWEN3 = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
_HF = "transformers.models"
_REMOTE = "transformers_modules"
"""Where transformers puts code that comes with a checkpoint."""
OWN_TOWER = "vision_model"
"""The attribute of a language model that has a vision tower itself (ROLL's)."""
POSITIONS_FIRST = {"mcore_bridge.model.gpt_model.GPTModel"}
"""Language models whose mask of images' positions is [positions, samples] instead of [samples,
positions]: ms-swift's."""
ROTARY = {
    "megatron.core.models.common.embeddings.rotary_pos_embedding.MultimodalRotaryEmbedding",
    f"{_QWEN3}.rope.Qwen3VLMultimodalRotaryEmbedding",
    "mbridge.models.qwen3_vl.rope_utils.Qwen3VLMultimodalRotaryEmbedding",
    "mbridge.models.qwen3_5.rope_utils.Qwen3VLMultimodalRotaryEmbedding",
    "mcore_adapter.models.qwen3_vl.rope_utils.Qwen3VLMultimodalRotaryEmbedding",
}
"""Classes of rotary embeddings that are called with three positions a token."""


class Tower(NamedTuple):
    """A class of tower, or of model with a method that runs towers: what an image or a clip comes
    to depends on it alone.

    Attributes:
        form: of it, how it is called.
        needs: its `_attn_implementation`, if with another one images see one another.
        method: what is called.
        inside: modules that the method runs, where they are not all of it.
    """

    form: Callable[[Any], Images] = lambda _: Images("grid_thw")
    needs: str = ""
    method: str = "forward"
    inside: tuple[str, ...] = ()

    def parts(self, module: Any) -> list[Any]:
        """The modules that run; None where a pipeline stage has none."""
        return [getattr(module, name) for name in self.inside] if self.inside else [module]


_OF_IMAGES = (
    f"{_HF}.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel",
    f"{_HF}.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
    f"{_HF}.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel",
    f"{_HF}.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel",
    f"{_HF}.qwen3_5.modeling_qwen3_5.Qwen3_5VisionModel",
    f"{_HF}.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeVisionModel",
    f"{_HF}.qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniVisionEncoder",
    f"{_HF}.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeVisionEncoder",
    f"{_HF}.glm4v.modeling_glm4v.Glm4vVisionModel",
    f"{_HF}.glm4v_moe.modeling_glm4v_moe.Glm4vMoeVisionModel",
    f"{_QWEN3}.vision_model.Qwen3VLVisionModel",
    "mbridge.models.qwen2_5_vl.vision_model.Qwen2_5VisionModel",
    "mbridge.models.qwen3_vl.vision_model.Qwen3VLVisionModel",
)
TOWERS = {
    **dict.fromkeys(_OF_IMAGES, Tower()),
    f"{_HF}.qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniAudioEncoder": Tower(
        partial(Clips, masked=True)
    ),
    f"{_HF}.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeAudioEncoder": Tower(
        partial(Clips, masked=False)
    ),
    # Kimi-K2.5, of Megatron-Bridge: its eager attention adds 1 to scores inside an image, and
    # leaves the others.
    f"{_REMOTE}.modeling_kimi_k25.MoonViT3dPretrainedModel": Tower(
        lambda _: Images("grid_thws", apart=False, listed=True), "flash_attention_2"
    ),
    "megatron.bridge.models.nemotron_omni.modeling_nemotron_omni.NemotronOmniModel": Tower(
        Pixels, method="_encode_images", inside=("vision_model", "vision_projection")
    ),
}
"""Classes of towers in which an image, or a clip of sound, sees itself alone; they run once an
image (tower.py) unless they do anything at random, others once a call."""
SPLIT_BY_RANKS = {
    "mbridge.models.qwen3_vl.model.Qwen3VLModel",
    "mbridge.models.qwen3_5.model.Qwen3_5VLModel",
}
"""Models whose context-parallel ranks share the images of a call, and do not add up what their rows
send to these (`AllGatherVisionEmbeddings` in mbridge's core utilities)."""
_SET_BY = {"mrope_forward_thd_cp": "mbridge.models.qwen2_5_vl.rope_utils"}
"""Functions that models set as the forward of such a module, and where they are from."""


def own_tower(model: Any) -> Any:
    """The vision tower that a language model has itself; None without one."""
    return getattr(model, OWN_TOWER, None) if calls_parent(model) is not None else None


def tower(module: Any) -> Tower | None:
    """A vision tower's line of the table; None if what an image's rows depend on is not known, or
    chance."""
    line = TOWERS.get(forward_owner(module))
    if line is None or any(part is None or drops(part) for part in line.parts(module)):
        return None
    attention = getattr(module.__dict__.get("config"), "_attn_implementation", None)
    return line if line.needs in ("", attention) else None


def towers(model: Any) -> list[Any]:
    """The towers of a model chunk, wrapped or not; without those of which it is not known what an
    image's rows depend on, or chance."""
    modules = around(model, language_model(model))
    return [module for module in modules if tower(module) is not None]


def around(model: Any, inner: Any) -> Iterator[Any]:
    """Modules of a model chunk that are not inside its language model, `inner`; or are its own
    tower's."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module is not inner:
            yield module
            waiting += reversed([*module.children()])
        elif (own := own_tower(inner)) is not None:
            waiting.append(own)


def drops(tower: Any) -> bool:
    """Whether a vision tower drops anything at random, so that its next forward may be another; or
    moves its table of positions, as RADIO's does in training."""
    settled = "force_cpe_eval_mode", "interpolate_only_cpe"
    moves = tower.training and getattr(tower, "has_cpe", False)
    if moves and not any(getattr(tower, name, False) for name in settled):
        return True
    for module in (part for part in tower.modules() if part.training):
        if "Dropout" in type(module).__name__ and getattr(module, "p", None):
            return True
        own = vars(module) | getattr(module.__dict__.get("config"), "__dict__", {})
        if any("drop" in name and isinstance(p, float) and p > 0 for name, p in own.items()):
            return True
    return False


def has_images(model: Any, inner: Any) -> bool:
    """Whether a model chunk is of a vision-language model, whose language model is `inner`."""
    owners = TOWERS.keys() | SPLIT_BY_RANKS
    return has_mrope(inner) or any(
        forward_owner(module) in owners for module in around(model, inner)
    )


def refusals(model: Any, inner: Any) -> Iterator[Reason]:
    """What is refused of a vision-language model, wrapped or not, whose language model is `inner`,
    in every step: towers are frozen and thawed."""
    for module in around(model, inner):
        if forward_owner(module) not in SPLIT_BY_RANKS:
            continue
        weights = [*module.vision_model.parameters()] if module.vision_model is not None else []
        trains = any(weight.requires_grad for weight in weights)
        if trains and module.config.context_parallel_size > 1:
            yield SPLIT_IMAGES.given(type(module).__name__)
    own, config = own_tower(inner), inner.config
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    if ranks > 1 and own is not None and any(weight.requires_grad for weight in own.parameters()):
        yield IMAGES_OF_RANKS.given(type(inner).__name__)


def rotary_refusals(model: Any) -> Iterator[Reason]:
    """What is refused of a language model's rotary embedding of three positions a token."""
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None and has_mrope(model) and not knows_rotary(rotary):
        yield OTHER_ROTARY.given(type(rotary).__name__)


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
