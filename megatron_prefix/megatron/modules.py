"""What is refused of a model's modules, whatever its options say.

Segments compute attention and rotary positions themselves, by the rule of Megatron's own modules.
Another module in their place (a window of its own, capped scores, two rotary bases) would be left
out without a word, so it is refused. A module is told by the class that defines its method: a
subclass may change everything else. Importing the classes would need transformer-engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import megatron.core
from megatron.core.transformer.enums import AttnMaskType
from packaging.version import Version

from megatron_prefix.errors import Reason
from megatron_prefix.megatron.mixers import RECURRENT, Mixer, mixer_of, mixers, pattern_of
from megatron_prefix.plan.recurrent_spec import KINDS
from megatron_prefix.refusals.table import (
    DELTA_CP,
    DELTA_KERNEL,
    DETERMINISTIC,
    DROPOUT,
    MAMBA_PATH,
    MASK_TYPE,
    OTHER_CORE,
    OTHER_MIXER,
    OTHER_ROTARY,
    OTHER_SYMBOLS,
    OWN_FORWARD,
)

CORES = {
    "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "megatron.core.extensions.transformer_engine.TEDotProductAttention",
}
"""Classes of core attention whose rule segments follow; another one adds its name."""
ROTARY = {
    "megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding.YarnRotaryEmbedding",
}
_ATTENTION = {"megatron.core.transformer.attention.Attention"}
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.arbitrary)
"""With `arbitrary` (ModelOpt's layers) a call's mask decides: see `needs_masks`."""


def refusals(model: Any) -> Iterator[Reason]:
    """What is refused of the modules of a language model."""
    rotary = getattr(model, "rotary_pos_emb", None)
    if (
        rotary is not None
        and not {_owner(rotary, name) for name in ("forward", "get_emb")} <= ROTARY
    ):
        yield OTHER_ROTARY.given(type(rotary).__name__)
    yield from _mixer_refusals(model)
    for name, module in model.named_modules():
        if "Dropout" in type(module).__name__ and (getattr(module, "p", None) or 0) > 0:
            yield DROPOUT.given(module.p, name)


def _mixer_refusals(model: Any) -> Iterator[Reason]:
    """What is refused of the layers' attention and recurrences."""
    release = Version(Version(megatron.core.__version__).base_version)
    old_cp = model.config.context_parallel_size > 1 and release < Version("0.18")
    unknown = {*pattern_of(model)} - {*KINDS}
    if unknown:  # on any stage: else ranks that have none would wait for those that refuse
        yield OTHER_SYMBOLS.given(", ".join(sorted(unknown)))
    for number, layer in enumerate(model.decoder.layers):
        mixer = mixer_of(layer)
        if mixer is None:
            module = getattr(layer, "mixer", None) or getattr(layer, "self_attention", layer)
            yield OTHER_MIXER.given(number, type(module).__name__)
        elif mixer.kind == "attention":
            yield from _attention_refusals(number, mixer.module)
        elif mixer.kind == "GatedDeltaNet" and old_cp:
            yield DELTA_CP.given()
    yield from option_refusals(mixers(model), model.config)
    if why := _wrong_rule(model):
        yield DELTA_KERNEL.given(why)


def option_refusals(found: Iterable[Mixer], config: Any) -> Iterator[Reason]:
    """What is refused of the options of recurrent layers; Megatron reads these in every forward."""
    for kind, module in found:
        if kind in RECURRENT and getattr(config, "deterministic_mode", False):
            yield DETERMINISTIC.given()
        if kind == "MambaMixer" and not module.use_mem_eff_path:
            yield MAMBA_PATH.given()


def _wrong_rule(model: Any) -> str | None:
    """Why the gated delta rule cannot be used on the model's GPU; tried once a process."""
    kinds = {mixer.kind for mixer in map(mixer_of, model.decoder.layers) if mixer is not None}
    if "GatedDeltaNet" not in kinds or next(model.parameters()).device.type != "cuda":
        return None
    from megatron_prefix.layers.recurrent import probe  # it loads the CPU's kernels to compare with

    config = model.config
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    return probe.refusals(
        "cuda",
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_num_value_heads // ranks,
    )["GatedDeltaNet"]


def needs_masks(model: Any) -> bool:
    """Whether attention of a language model is causal only where its calls have a causal mask."""
    return any(
        getattr(module, "attn_mask_type", None) is AttnMaskType.arbitrary
        for mixer in mixers(model)
        if mixer.kind == "attention"
        for module in (mixer.module, mixer.module.core_attention)
    )


def _attention_refusals(number: int, attention: Any) -> Iterator[Reason]:
    core = attention.core_attention
    if _owner(attention, "forward") not in _ATTENTION:
        yield OWN_FORWARD.given(number, type(attention).__name__)
        return
    if _owner(core, "forward") not in CORES:
        yield OTHER_CORE.given(number, type(core).__name__)
        return
    for module in (attention, core):
        mask = getattr(module, "attn_mask_type", AttnMaskType.causal)
        if isinstance(mask, AttnMaskType) and mask not in _CAUSAL:
            yield MASK_TYPE.given(number, mask.name)
            return


def _owner(module: Any, method: str) -> str:
    """The full name of the class that defines a method of a module; "" where none does, or the
    instance has another."""
    if method in vars(module):
        return ""
    for base in type(module).__mro__:
        if method in vars(base):
            return f"{base.__module__}.{base.__qualname__}"
    return ""
