"""How many layers of which kind a model has.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_prefix.models.presets import ModelSpec
from megatron_prefix.models.recurrent_spec import GatedDelta, Mamba, Recurrent


@dataclass(frozen=True)
class LayerMix:
    """The layers of a model, or of a part of it.

    Attributes:
        total: layers of any kind.
        attention: layers with attention.
        mlps: layers with an MLP or experts.
        recurrent: the shapes of layers that are recurrent, and how many have each.
        output_gate: whether attention has a gate on its output.
        ends_with_attention: whether the last layer has attention and an MLP.
    """

    total: int
    attention: int
    mlps: int
    recurrent: tuple[tuple[Recurrent, int], ...] = ()
    output_gate: bool = False
    ends_with_attention: bool = True

    @classmethod
    def of_spec(cls, spec: ModelSpec) -> LayerMix:
        """Of a ModelSpec."""
        numbers = range(spec.num_layers)
        kinds = [spec.kind(layer) for layer in numbers]
        last = spec.num_layers - 1
        layers = spec.recurrent
        return cls(
            spec.num_layers, kinds.count("attention"), sum(map(spec.has_mlp, numbers)),
            () if layers is None else ((layers, kinds.count("recurrent")),), spec.output_gate,
            kinds[last] == "attention" and spec.has_mlp(last),
        )  # fmt: skip

    @classmethod
    def of_config(cls, config: Any, pattern: str = "") -> LayerMix:
        """Of a Megatron TransformerConfig.

        Args:
            config: the model's.
            pattern: symbols of a hybrid model's layers, which no config has.
        """
        gate = bool(getattr(config, "attention_output_gate", False))
        total = config.num_layers
        if pattern:
            shapes: dict[str, Callable[[Any], Recurrent]] = {"M": _mamba_of, "G": _gated_delta_of}
            found = tuple(
                (shape(config), pattern.count(symbol))
                for symbol, shape in shapes.items()
                if symbol in pattern
            )
            mlps = sum(symbol in "-E" for symbol in pattern)
            return cls(len(pattern), pattern.count("*"), mlps, found, gate, False)
        if getattr(config, "experimental_attention_variant", None) != "gated_delta_net":
            return cls(total, total, total, output_gate=gate)
        every = config.linear_attention_freq
        flags = (
            [number % every != 0 for number in range(1, total + 1)]
            if isinstance(every, int)
            else [bool(flag) for flag in every]
        )
        layers = ((_gated_delta_of(config), sum(flags)),)
        return cls(total, flags.count(False), total, layers, gate, not flags[-1])

    def share(self, kind: str) -> float:
        """The share of layers that have "attention" or "mlps"."""
        return float(getattr(self, kind)) / self.total

    def recurrence(self, size: Callable[[Any], float]) -> float:
        """The sum of a size of all recurrent layers."""
        return sum((num * size(layer) for layer, num in self.recurrent), 0.0)


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
        "M", heads or 2 * config.hidden_size // config.mamba_head_dim, config.mamba_head_dim,
        config.mamba_state_dim, config.mamba_num_groups,
    )  # fmt: skip
