"""An MLP: it works on every position alone, so segments run it as it is.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_prefix.layers.kind import Kind, Override, Running, Slot
from megatron_prefix.plan.layer_numbers import Sharding


class MLP(Kind):
    """Megatron's MLP."""

    name, symbol, slot = "MLP", "-", Slot.MLP

    def fills(self, config: Any, layer: int) -> bool:
        return True

    def module_of(self, layer: Any) -> Any | None:
        module = getattr(layer, "mlp", None)
        return None if type(module).__name__ == "IdentityOp" else module

    def parameters(self, config: Any) -> int:
        weights: int = matrices(config) * config.hidden_size * config.ffn_hidden_size
        return weights

    def dropped(self, config: Any, sharding: Sharding) -> float:
        modules = getattr(config, "recompute_modules", None) or ()
        again = getattr(config, "recompute_granularity", None)
        runs_again = again == "full" or (again and "mlp" in modules)
        if runs_again or not can_drop_activation(config):
            return 0.0
        numbers: float = config.ffn_hidden_size / sharding.tp
        return numbers * sharding.itemsize

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        config = getattr(module, "config", None)  # a model's own MLP may have none
        if config is None or "forward" in vars(module) or not can_drop_activation(config):
            return

        def forward(*args: Any, **kwargs: Any) -> Any:
            if (tap := running.mlp_tap) is not None:
                return tap(module, args, kwargs)
            return type(module).forward(module, *args, **kwargs)

        yield module, "forward", forward


def can_drop_activation(config: Any) -> bool:
    """Whether dropping what the activation function gives frees memory: not where the second
    product keeps its input in another form, or where both are one operator; nor where the
    activation function keeps its output, and not its input, which would be kept in its place (ReLU,
    squared or not)."""
    ways = ("fp8", "fp4", "use_transformer_engine_op_fuser", "cpu_offloading")
    function = activation_name(config)
    keeps = config.gated_linear_unit or "gelu" in function or function == "silu"
    return keeps and not any(getattr(config, way, None) for way in ways)


def matrices(config: Any) -> int:
    """Matrices of an MLP, all of one size: with a gate there is one more."""
    return 3 if config.gated_linear_unit else 2


def activation_name(config: Any) -> str:
    """Of a model's activation function; "" where a config has none."""
    name: str = getattr(getattr(config, "activation_func", None), "__name__", "")
    return name
