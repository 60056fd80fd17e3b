"""What some steps need and most do not: one table of strings.  Pure.

A feature lives in a folder of its own. It imports the core, which imports none of it: this table
says by name what to import, and when. Entry points of packages would not do: the order decides, a
test reads it, and ranks with different packages would wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

_FOLDER = "megatron_prefix.features."


class FeatureKind(NamedTuple):
    """A kind of layer that few models have.

    Attributes:
        path: "module:Class" of a `Kind`.
        in_config: whether layers of a model with this config may be of it.
        in_layer: whether one of Megatron's layers may have a module of it.
    """

    path: str
    in_config: Callable[[Any], bool]
    in_layer: Callable[[Any], bool]


def _attention(layer: Any) -> Any:
    return getattr(layer, "self_attention", None)


KINDS: tuple[FeatureKind, ...] = (
    FeatureKind(
        f"{_FOLDER}own_gdn.kind:OwnGatedDeltaNet",
        lambda config: hasattr(config, "own_delta_layers"),
        lambda layer: hasattr(_attention(layer), "linear_attn"),
    ),
    FeatureKind(
        f"{_FOLDER}dsa.kind:DSA",
        lambda config: getattr(config, "experimental_attention_variant", None) == "dsa",
        lambda layer: hasattr(getattr(_attention(layer), "core_attention", None), "indexer"),
    ),
)
"""Tried before the core's kinds, in this order."""


def load(path: str) -> Any:
    """What a path of this table names; its module is imported now if it has not been.

    Args:
        path: "module:name".

    Raises:
        ImportError: the module, or what it needs, cannot be imported.
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
