"""Language models with a forward of their own: the classes that are taken, by name.

The language model is the module that owns the decoder (install.py); a class of its own has a
forward of its own, and a line here if that gives every position to the decoder as Megatron's does.
A model may be its own language model: its forward makes embeddings, and calls its parent class's.
[pure]
"""

from __future__ import annotations

from typing import Any, NamedTuple

_BRIDGE = "megatron.bridge.models"
_QWEN3 = f"{_BRIDGE}.qwen_vl.modelling_qwen3_vl"
_ROLL = "mcore_adapter.models"
_REMOTE = "transformers_modules"
"""Where transformers puts code that comes with a checkpoint."""


class Family(NamedTuple):
    """A class of language model with a forward of its own.

    Attributes:
        calls_parent: whether it calls its parent class's for the language model.
    """

    forward: str
    used_by: str
    calls_parent: bool = False


FAMILIES = (
    Family(f"{_QWEN3}.text_model.Qwen3VLGPTModel", "Megatron-Bridge's Qwen3-VL and Qwen3.5"),
    Family("mbridge.models.qwen3_vl.gpt_model.Qwen3VLGPTModel", "mbridge's Qwen3-VL"),
    Family("mcore_bridge.model.gpt_model.GPTModel", "ms-swift's models"),
    Family(
        f"{_ROLL}.qwen2_vl.modeling_qwen2_vl.Qwen2VLModel", "ROLL's Qwen2-VL", calls_parent=True
    ),
    Family(
        f"{_ROLL}.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel", "ROLL's Qwen2.5-VL",
        calls_parent=True,
    ),
    Family(
        f"{_ROLL}.qwen3_vl.modeling_qwen3_vl.Qwen3VLModel", "ROLL's Qwen3-VL, with experts, too",
        calls_parent=True,
    ),
)  # fmt: skip
"""Another class adds its line; those with Megatron's own GPTModel inside need none."""


def family(model: Any) -> Family | None:
    """A language model's line of the table; None for Megatron's own classes, and unknown ones."""
    name = forward_owner(model)
    return next((line for line in FAMILIES if line.forward == name), None)


def forward_owner(module: Any) -> str:
    """The full name of the class that defines a module's forward, whatever its instance has."""
    base = defining_class(module)
    if base is None:
        return ""
    path = base.__module__
    if path.startswith(f"{_REMOTE}."):  # without the checkpoint's name and revision
        path = f"{_REMOTE}.{path.rpartition('.')[2]}"
    return f"{path}.{base.__qualname__}"


def defining_class(module: Any) -> type | None:
    """See `forward_owner`."""
    return next((base for base in type(module).__mro__ if "forward" in vars(base)), None)


def calls_parent(model: Any) -> type | None:
    """The class whose forward calls its parent's for the language model; None if it is that of the
    language model itself."""
    line = family(model)
    return defining_class(model) if line is not None and line.calls_parent else None


def has_mrope(model: Any) -> bool:
    """Whether a language model makes its rotary table from three positions a token, which it is
    called with."""
    attends = not getattr(model.config, "multi_latent_attention", False)
    return attends and getattr(model, "position_embedding_type", "") == "mrope"


def length_scaling(model: Any) -> str | None:
    """The rope_type by which a model makes its rotary table anew for the length of every call
    (ms-swift's, of Hugging Face's configs); None: it does not."""
    kind = (getattr(model, "hf_rope_scaling", None) or {}).get("rope_type")
    return kind if kind in ("dynamic", "longrope") else None
