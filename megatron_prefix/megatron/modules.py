"""What is refused of a model's modules, whatever its options say.

Segments compute attention and rotary positions themselves, by the rule of Megatron's own modules.
Another module in their place (a window of its own, capped scores, two rotary bases) would be left
out without a word, so it is refused. A module is told by the class that defines its method: a
subclass may change everything else. Importing the classes would need transformer-engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.enums import AttnMaskType

from megatron_prefix.megatron.mixers import mixers

CORES = {
    "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "megatron.core.extensions.transformer_engine.TEDotProductAttention",
}
"""Classes of core attention whose rule segments follow; another one adds its name."""
ROTARY = {
    "megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding.YarnRotaryEmbedding",
}
REFUSED = {
    "attention of another class": "use Megatron's SelfAttention, causal, with"
    " DotProductAttention or TEDotProductAttention",
    "rotary embedding of another class": "use Megatron's RotaryEmbedding or YarnRotaryEmbedding",
    "dropout in a module": "set it to 0: copies of a prompt would drop differently",
}
"""Modules that `refusals` tells of, and what to do."""
_ATTENTION = {"megatron.core.transformer.attention.Attention"}
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.arbitrary)
"""With `arbitrary` (ModelOpt's layers) a call's mask decides: see `needs_masks`."""


def refusals(model: Any) -> Iterator[str]:
    """One line for every module of a language model that the schedule cannot run."""
    rotary = getattr(model, "rotary_pos_emb", None)
    if (
        rotary is not None
        and not {_owner(rotary, name) for name in ("forward", "get_emb")} <= ROTARY
    ):
        yield (
            f"rotary embedding {type(rotary).__name__}: use Megatron's RotaryEmbedding or"
            " YarnRotaryEmbedding, or the stock schedule"
        )
    for number, mixer in enumerate(mixers(model)):
        if mixer.kind == "attention" and (why := _attention_refusal(mixer.module)):
            yield f"layer {number}'s {why}"
    for name, module in model.named_modules():
        if "Dropout" in type(module).__name__ and (getattr(module, "p", None) or 0) > 0:
            yield (
                f"{name}, dropout of {module.p}: set it to 0: copies of a prompt would drop"
                " differently"
            )


def needs_masks(model: Any) -> bool:
    """Whether attention of a language model is causal only where its calls have a causal mask."""
    return any(
        getattr(module, "attn_mask_type", None) is AttnMaskType.arbitrary
        for mixer in mixers(model)
        if mixer.kind == "attention"
        for module in (mixer.module, mixer.module.core_attention)
    )


def _attention_refusal(attention: Any) -> str | None:
    core = attention.core_attention
    if _owner(attention, "forward") not in _ATTENTION:
        return (
            f"{type(attention).__name__}, which has a forward of its own: use Megatron's"
            " SelfAttention, or the stock schedule"
        )
    if _owner(core, "forward") not in CORES:
        return (
            f"core attention {type(core).__name__}: use Megatron's DotProductAttention or"
            " TEDotProductAttention, or the stock schedule"
        )
    for module in (attention, core):
        mask = getattr(module, "attn_mask_type", AttnMaskType.causal)
        if isinstance(mask, AttnMaskType) and mask not in _CAUSAL:
            return f"attn_mask_type {mask.name}: use causal attention, or the stock schedule"
    return None


def _owner(module: Any, method: str) -> str:
    """The full name of the class that defines a method of a module; "" where none does, or the
    instance has another."""
    if method in vars(module):
        return ""
    for base in type(module).__mro__:
        if method in vars(base):
            return f"{base.__module__}.{base.__qualname__}"
    return ""
