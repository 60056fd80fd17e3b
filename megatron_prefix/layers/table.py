"""The kinds of layers, and what fills the slots of a model's layers.  Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron_prefix import features
from megatron_prefix.errors import Reason
from megatron_prefix.layers.attention import Attention
from megatron_prefix.layers.kind import Heads, Kind, Part, Slot
from megatron_prefix.layers.mlp import MLP
from megatron_prefix.layers.releases import transformer_layers
from megatron_prefix.refusals.table import OTHER_MIXER
from megatron_prefix.tree.payload_map import Form

KINDS: tuple[Kind, ...] = (Attention(), MLP())
"""In a slot the first that knows the module, or the config, has it; before them those of features
(`kinds_of`, `_kinds_in`)."""
_OF_FEATURES = {kind.symbol for kind in features.KINDS if kind.symbol}
SYMBOLS = frozenset(_OF_FEATURES | {kind.symbol for kind in KINDS})


def kinds_of(config: Any, symbols: str = "") -> tuple[Kind, ...]:
    """The kinds that layers of a model with this config may be of.

    Args:
        symbols: of the layers of a hybrid model, which its config need not tell.
    """
    return _with_features(lambda kind: kind.in_config(config) or kind.symbol in {*symbols})


def _kinds_in(layer: Any) -> tuple[Kind, ...]:
    return _with_features(lambda kind: kind.in_layer(layer))


def _with_features(has: Callable[[features.FeatureKind], bool]) -> tuple[Kind, ...]:
    return (*(_kind_at(kind.path) for kind in features.KINDS if has(kind)), *KINDS)


@functools.cache
def _kind_at(path: str) -> Kind:
    kind: Kind = features.load(path)()
    return kind


def behind(config: Any) -> Kind | None:
    """The kind of what a model has behind its decoder; None: nothing."""
    return next((kind for kind in kinds_of(config) if kind.is_behind(config)), None)


def heads(config: Any) -> Heads:
    """Heads of a model's attention on a rank."""
    return next(of_kind for kind in kinds_of(config) if (of_kind := kind.heads(config)) is not None)


def windows(config: Any) -> set[int]:
    """Windows that a config gives to layers of a model, on any stage."""
    kinds = [kind for kind in kinds_of(config) if kind.has_window]
    filled = (kind.fills(config, layer) for kind in kinds for layer in range(config.num_layers))
    return {config.window_size[0]} if any(filled) else set()


def part_of(layer: Any, slot: Slot) -> Part | None:
    """What fills a slot of one of Megatron's layers; None if that is not known."""
    for kind in _kinds_in(layer):
        if kind.slot is slot and (module := kind.module_of(layer)) is not None:
            return Part(kind, module)
    return Part(None) if slot is Slot.MLP or _has_no_mixer(layer) else None


def parts(model: Any, slot: Slot) -> list[Part]:
    """Of all layers of a language model; what is not known counts as nothing."""
    return [part_of(layer, slot) or Part(None) for layer in transformer_layers(model)]


def payload_parts(model: Any) -> list[Part]:
    """What leaves a payload, in the order in which it runs: the sidecar has their numbers."""
    return [part for part in parts(model, Slot.MIXER) if part.kind and part.kind.form]


def forms(parts: Iterable[Part]) -> list[Form]:
    """Of the payloads of some parts of a model."""
    return [form for part in parts if part.kind and (form := part.kind.form_in(part.module))]


def with_module_fields(config: Any, models: Iterable[Any]) -> Any:
    """A model's config with what its modules tell beside it, as the numbers of kinds want it."""
    fields: dict[str, Any] = {}
    for layer in (layer for model in models for layer in transformer_layers(model)):
        for kind in _kinds_in(layer):
            fields |= kind.told(layer)
    return _ConfigWithFields(config, fields) if fields else config


class _ConfigWithFields:
    def __init__(self, config: Any, fields: dict[str, Any]) -> None:
        vars(self).update(fields, _config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_config"], name)


def refusals(model: Any) -> Iterator[Reason]:
    """What is refused of a language model's layers, for good."""
    for number, layer in enumerate(transformer_layers(model)):
        for slot in Slot:
            part = part_of(layer, slot)
            if part is None:
                module = getattr(layer, "mixer", None) or getattr(layer, "self_attention", layer)
                yield OTHER_MIXER.given(number, type(module).__name__)
            elif part.kind is not None:
                yield from part.kind.refusals(number, part.module, model)


def _has_no_mixer(layer: Any) -> bool:
    attention = getattr(layer, "self_attention", None)
    has_none = attention is None or type(attention).__name__ == "IdentityOp"
    return has_none and hasattr(layer, "mlp") and not hasattr(layer, "mixer")
