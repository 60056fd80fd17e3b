"""How many layers of which kind a model has.  Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_prefix.plan.recurrent_spec import GatedDelta, Mamba, Recurrent


@dataclass(frozen=True)
class LayerMix:
    """The layers of a model.

    Attributes:
        mixers: a symbol a layer: "*" attention, that of `recurrent`, or "-" for neither.
        mlps: layers with an MLP or experts.
        recurrent: symbols and shapes of recurrent layers.
        output_gate: whether attention has a gate on its output.
        ends_with_attention: whether the last layer has attention and an MLP.
    """

    mixers: str
    mlps: int
    recurrent: tuple[tuple[str, Recurrent], ...] = ()
    output_gate: bool = False
    ends_with_attention: bool = True

    @classmethod
    def of_config(cls, config: Any, pattern: str | None = None) -> LayerMix:
        """Of a Megatron TransformerConfig, or of a ModelSpec, whose fields have the same names.

        Args:
            config: the model's.
            pattern: symbols of a hybrid model's layers (default: `hybrid_override_pattern`, which
                a spec has and no TransformerConfig).
        """
        pattern = pattern_of(config) if pattern is None else pattern
        gate = bool(getattr(config, "attention_output_gate", False))
        total = config.num_layers
        if pattern:
            shapes: dict[str, Callable[[Any], Recurrent]] = {"M": _mamba_of, "G": _gated_delta_of}
            found = tuple(
                (symbol, shape(config)) for symbol, shape in shapes.items() if symbol in pattern
            )
            mixers = "".join(symbol if symbol in "*MG" else "-" for symbol in pattern)
            mlps = sum(symbol in "-E" for symbol in pattern)
            return cls(mixers, mlps, found, gate, False)
        if getattr(config, "experimental_attention_variant", None) != "gated_delta_net":
            return cls("*" * total, total, output_gate=gate)
        every = config.linear_attention_freq
        flags = (
            [number % every != 0 for number in range(1, total + 1)]
            if isinstance(every, int)
            else [bool(flag) for flag in every]
        )
        mixers = "".join("G" if flag else "*" for flag in flags)
        return cls(mixers, total, (("G", _gated_delta_of(config)),), gate, not flags[-1])

    @property
    def total(self) -> int:
        """Layers of any kind."""
        return len(self.mixers)

    @property
    def attention(self) -> int:
        """Layers with attention."""
        return self.mixers.count("*")

    def recurrence(self, size: Callable[[Any], float]) -> float:
        """The sum of a size of all recurrent layers."""
        found = (self.mixers.count(symbol) * size(layer) for symbol, layer in self.recurrent)
        return sum(found, 0.0)

    def stages(self, num: int) -> tuple[str, ...]:
        """`mixers` of every one of `num` stages, as even as can be."""
        ends = [len(self.mixers) * stage // num for stage in range(num + 1)]
        return tuple(self.mixers[a:b] for a, b in itertools.pairwise(ends))


def pattern_of(config: Any) -> str:
    """Symbols of a hybrid model's layers, where a config or spec has them; "" for a GPTModel."""
    return getattr(config, "hybrid_override_pattern", None) or ""


def layers_with_experts(config: Any, pattern: str | None = None) -> list[bool]:
    """Whether the MLP of each layer is a mixture of experts; see `LayerMix.of_config`."""
    pattern = pattern_of(config) if pattern is None else pattern
    if pattern:
        return [symbol == "E" for symbol in pattern]
    if not getattr(config, "num_moe_experts", None):
        return [False] * config.num_layers
    frequency = getattr(config, "moe_layer_freq", 1)
    if isinstance(frequency, int):  # as in megatron/core/models/gpt/gpt_layer_specs.py
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(flag) for flag in frequency]


def spread(num_layers: int, num_host: int) -> list[int]:
    """Which of some layers are on the host where `num_host` are: evenly spread, the last always."""
    share = min(num_host, num_layers)
    return [
        layer
        for layer in range(num_layers)
        if (layer + 1) * share // num_layers > layer * share // num_layers
    ]


def _gated_delta_of(config: Any) -> GatedDelta:
    """The shape of the GatedDeltaNet layers of a TransformerConfig."""
    return GatedDelta(
        config.linear_num_key_heads, config.linear_num_value_heads,
        config.linear_key_head_dim, config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )  # fmt: skip


def _mamba_of(config: Any) -> Mamba:
    """The shape of the Mamba2 layers of a TransformerConfig."""
    heads = getattr(config, "mamba_num_heads", None)
    return Mamba(
        heads or 2 * config.hidden_size // config.mamba_head_dim, config.mamba_head_dim,
        config.mamba_state_dim, config.mamba_num_groups,
    )  # fmt: skip
