"""An MLP: it works on every position alone, so segments run it as it is.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron_prefix.layers import precision
from megatron_prefix.layers.kind import Kind, Override, Running, Slot
from megatron_prefix.plan.footprint import Execution
from megatron_prefix.plan.layer_numbers import LayerMemory


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

    def memory(self, config: Any, form: Execution) -> LayerMemory:
        """See Kind; it does not run where nobody reads its output."""
        width = config.ffn_hidden_size / form.tp
        numbers = numbers_between(width, config, form)
        memory = saving(
            numbers * form.itemsize - precision.less(width, config, form), numbers, config, form
        )
        memory = replace(memory, given=precision.projected_bytes(config, form))
        layer_input = config.hidden_size / form.sequence_ranks * form.itemsize
        if form.selects("mlp"):  # Megatron keeps its input, and runs it again
            again = memory.inner - layer_input
            return replace(memory, inner=layer_input, wave=layer_input, again=again, unread=0.0)
        act = config.ffn_hidden_size / form.tp * form.itemsize * _can_drop_activation(config)
        return replace(memory, act=act, unread=0.0)

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        config = getattr(module, "config", None)  # a model's own MLP may have none
        if config is None or "forward" in vars(module) or not _can_drop_activation(config):
            return

        def forward(*args: Any, **kwargs: Any) -> Any:
            if (tap := running.mlp_tap) is not None:
                return tap(module, args, kwargs)
            return type(module).forward(module, *args, **kwargs)

        yield module, "forward", forward


def _can_drop_activation(config: Any) -> bool:
    """Whether dropping what the activation function gives frees memory: not where the second
    product keeps its input in another form, or where both are one operator; nor where the
    activation function keeps its output, and not its input, which would be kept in its place (ReLU,
    squared or not)."""
    ways = ("fp8", "fp4", "use_transformer_engine_op_fuser", "cpu_offloading")
    function = _function(config)
    keeps = config.gated_linear_unit or "gelu" in function or function == "silu"
    return keeps and not any(getattr(config, way, None) for way in ways)


def matrices(config: Any) -> int:
    """Matrices of an MLP, all of one size: with a gate there is one more."""
    return 3 if config.gated_linear_unit else 2


def numbers_between(width: float, config: Any, form: Execution) -> float:
    """Numbers a position that an MLP of a width saves, without its input."""
    gated = config.gated_linear_unit
    inputs = 2 if gated else 1
    clamped = getattr(config, "activation_func_clamp_value", None) is not None
    if form.fused_activation:  # what is clamped is a tensor of its own
        return width * (inputs * (1 + clamped) + 1)
    # Megatron's quick_gelu saves a sigmoid, too; a ModelSpec has no function, but says so.
    quick = getattr(config, "quick_geglu", False) or _function(config) == "quick_gelu"
    return width * (inputs + (3 if gated else 1) + clamped + quick)


def _function(config: Any) -> str:
    name: str = getattr(getattr(config, "activation_func", None), "__name__", "")
    return name


def saving(num_bytes: float, numbers: float, config: Any, form: Execution) -> LayerMemory:
    """Of what saves so many bytes a position of so many numbers, and is not recomputed; gradients
    of these are not in FP8."""
    hidden = config.hidden_size / form.sequence_ranks
    return LayerMemory(num_bytes, num_bytes, temporary=(numbers + 2 * hidden) * form.itemsize)
