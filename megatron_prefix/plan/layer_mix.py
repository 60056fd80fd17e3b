"""How many layers of which kind a model has.  Pure."""

from __future__ import annotations

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
        recurrent: layers that are `layer`.
        layer: the shape of recurrent ones; None where there are none.
        output_gate: whether attention has a gate on its output.
        ends_with_attention: whether the last layer has attention and an MLP.
    """

    total: int
    attention: int
    mlps: int
    recurrent: int = 0
    layer: Recurrent | None = None
    output_gate: bool = False
    ends_with_attention: bool = True

    @classmethod
    def of_spec(cls, spec: ModelSpec) -> LayerMix:
        """Of a ModelSpec."""
        numbers = range(spec.num_layers)
        kinds = [spec.kind(layer) for layer in numbers]
        last = spec.num_layers - 1
        return cls(
            spec.num_layers, kinds.count("attention"), sum(map(spec.has_mlp, numbers)),
            kinds.count("recurrent"), spec.recurrent, spec.output_gate,
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
            layer = mamba_of(config, pattern)
            kinds = [pattern.count(symbol) for symbol in "*M"]
            mlps = sum(symbol in "-E" for symbol in pattern)
            return cls(len(pattern), kinds[0], mlps, kinds[1], layer, gate, False)
        if getattr(config, "experimental_attention_variant", None) != "gated_delta_net":
            return cls(total, total, total, output_gate=gate)
        every = config.linear_attention_freq
        flags = (
            [number % every != 0 for number in range(1, total + 1)]
            if isinstance(every, int)
            else [bool(flag) for flag in every]
        )
        delta = GatedDelta(
            config.linear_num_key_heads, config.linear_num_value_heads,
            config.linear_key_head_dim, config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
        )  # fmt: skip
        return cls(total, flags.count(False), total, sum(flags), delta, gate, not flags[-1])

    def share(self, kind: str) -> float:
        """The share of layers that have "attention", "mlps" or are "recurrent"."""
        return float(getattr(self, kind)) / self.total


def mamba_of(config: Any, pattern: str) -> Mamba:
    """The shape of the Mamba2 layers of a TransformerConfig; others count as MLPs."""
    known = "".join(symbol if symbol in "M*-E" else "-" for symbol in pattern)
    heads = getattr(config, "mamba_num_heads", None)
    return Mamba(
        known, heads or 2 * config.hidden_size // config.mamba_head_dim, config.mamba_head_dim,
        config.mamba_state_dim, config.mamba_num_groups,
    )  # fmt: skip
