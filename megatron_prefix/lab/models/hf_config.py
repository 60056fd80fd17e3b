"""Reading a Hugging Face `config.json`: its fields, with errors that name file and field. [pure]"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models.presets import RopeScaling


class Config:
    """One config.json; errors name file and field."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def wrong(self, field: str, problem: str) -> UserError:
        """The error for one field."""
        return UserError(f"{self.path}: {field} {problem}")

    def number(self, field: str, default: float | None = None) -> Any:
        """A number; without a default the field is required."""
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.wrong(field, "is missing; take the config.json that came with the model")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(field, f"is {value!r}, not a number; fix the file")
        return value

    def size(self, field: str, default: int | None = None) -> int:
        """An integer from 1; without a default the field is required."""
        value = self.number(field, default)
        if not isinstance(value, int) or value < 1:
            raise self.wrong(field, f"is {value!r}, not an integer from 1; fix the file")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """true or false."""
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, f"is {value!r}, not true or false; fix the file")
        return value

    def names(self, field: str) -> list[str] | None:
        """A list of names; None if there is none."""
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong(field, f"is {value!r}, not a list of names; fix the file")
        return value

    def inner(self, field: str) -> Config:
        """An object inside; empty if there is none."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(field, f"is {value!r}, not an object; fix the file")
        return Config(self.path, value or {})

    def only(self, field: str, supported: Any, why: str) -> None:
        """Refuse any value but the supported one; the field may be absent."""
        value = self.values.get(field)
        if value is not None and value != supported:
            raise self.wrong(field, f"{value!r} is not supported ({why}); use {supported!r}")


def common(config: Config, *, max_position: int, epsilon: float = 1e-6) -> dict[str, Any]:
    """Fields of every family, by their names in ModelSpec; but for the number of layers.

    Args:
        config: of the model.
        max_position, epsilon: the family's `max_position_embeddings` and `rms_norm_eps`.
    """
    return {
        "name": config.path.parent.name or config.path.stem,
        "hidden_size": config.size("hidden_size"),
        "num_attention_heads": config.size("num_attention_heads"),
        "vocab_size": config.size("vocab_size"),
        "max_position": config.size("max_position_embeddings", max_position),
        "tie_embeddings": config.flag("tie_word_embeddings"),
        "layernorm_epsilon": config.number("rms_norm_eps", epsilon),
        "init_method_std": config.number("initializer_range", 0.02),
    }


def key_heads(config: Config, default: int) -> int:
    """`num_key_value_heads`: `default` if it is absent, the number of heads if it is null."""
    field = "num_key_value_heads"
    is_null = field in config.values and config.values[field] is None
    return config.size("num_attention_heads" if is_null else field, default)


class Rope(NamedTuple):
    """What a config says of RoPE: where, its fields, its base and its type."""

    field: str
    values: Config
    base: float
    kind: Any

    def wrong(self, supported: str) -> UserError:
        """The error for a type that is not supported."""
        problem = f"{self.kind!r} is not supported; use {supported}"
        return self.values.wrong(f"{self.field}.rope_type", problem)


def rope(config: Config) -> Rope:
    """From `rope_theta` and `rope_scaling` or, since transformers 5, from `rope_parameters`."""
    field = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    values = config.inner(field)
    base = values.number("rope_theta", config.number("rope_theta", 10000.0))
    kind = values.values.get("rope_type", values.values.get("type", "default"))
    return Rope(field, values, float(base), kind)


def llama_rope(config: Config) -> tuple[float, RopeScaling | None]:
    """Base and scaling of RoPE as Llama has it."""
    field, values, base, kind = found = rope(config)
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise found.wrong("'default' or 'llama3'")
    try:
        return base, RopeScaling(
            factor=float(values.number("factor")),
            low_freq_factor=float(values.number("low_freq_factor")),
            high_freq_factor=float(values.number("high_freq_factor")),
            original_max_position=values.size("original_max_position_embeddings"),
        )
    except UserError as error:
        raise UserError(f"{config.path}: {field}: {error}") from None
