"""[pure] When an option of Megatron's TransformerConfig is on.

Each is a partial of a function, so that a refusal can be sent to another rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Test = Callable[[str, Any], bool]
"""(name of the option, config) -> whether it is in the way."""


def on(name: str, config: Any) -> bool:
    """Set to something that is not false, zero or empty."""
    return bool(getattr(config, name, None))


def above(most: int) -> Test:
    """A number larger than `most`."""
    return partial(_above, most)


def with_experts(name: str, config: Any) -> bool:
    """On in a model with experts."""
    return on("num_moe_experts", config) and on(name, config)


def cut_wider(name: str, config: Any) -> bool:
    """Experts in more parts than other layers."""
    parts = getattr(config, name, None) or 1
    return on("num_moe_experts", config) and parts > config.tensor_model_parallel_size


def other_than(usual: str) -> Test:
    """Set to something other than `usual`."""
    return partial(_other_than, usual)


def equal_to(value: str) -> Test:
    """Set to `value`."""
    return partial(_equal_to, value)


def balances(*kinds: str, others: bool = False) -> Test:
    """One of these load-balancing types in a model with experts; with `others`, any but these."""
    return partial(_balances, kinds, others)


def scaled_by(*recipes: str, others: bool = False) -> Test:
    """Products in FP8 by one of these recipes; with `others`, by any but these."""
    return partial(_scaled_by, recipes, others)


def _above(most: int, name: str, config: Any) -> bool:
    return (getattr(config, name, None) or 0) > most


def _other_than(usual: str, name: str, config: Any) -> bool:
    return getattr(config, name, usual) not in (usual, None)


def _equal_to(value: str, name: str, config: Any) -> bool:
    return bool(getattr(config, name, None) == value)


def _balances(kinds: tuple[str, ...], others: bool, name: str, config: Any) -> bool:
    given = getattr(config, name, "none")
    given = [given] if isinstance(given, str) else given
    return on("num_moe_experts", config) and any((kind in kinds) != others for kind in given)


def _scaled_by(recipes: tuple[str, ...], others: bool, name: str, config: Any) -> bool:
    given = getattr(config, name, "delayed")  # Megatron's default
    return on("fp8", config) and (given in recipes) != others
