"""A GatedDeltaNet that a trainer brings itself: slime's and miles' Qwen3-Next and Qwen3.5.  Pure.

A Hugging Face module inside a TransformerLayer, all of it on every tensor-parallel rank. Megatron's
config says neither its sizes nor its layers: the module does. It is told by what it calls:
`HuggingfaceAttention.forward` gathers positions and calls `hf_forward`, that a norm and
`linear_attn`, and this flash-linear-attention's ShortConvolution and its rule. Its segments run in
features/own_gdn/layer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.features.recurrent.gdn import GatedDeltaNet
from megatron_prefix.layers.kind import Override, Running, owner
from megatron_prefix.plan.layer_numbers import LayerWork, Payload, Sharding
from megatron_prefix.refusals.table import (
    DELTA_KERNEL,
    OTHER_MIXER,
    OWN_DELTA_CP,
    OWN_DELTA_CUT,
    OWN_DELTA_HEADS,
    OWN_DELTA_MIXES,
    OWN_DELTA_STAGES,
)

_RULE = "chunk_gated_delta_rule"
_AROUND = frozenset({"input_layernorm", "linear_attn", "cu_seqlens_q"})
"""What `hf_forward` reads; the rest of the layer is under `linear_attn`."""


class OwnGatedDeltaNet(GatedDeltaNet):
    """Attention of slime's and miles', with a `linear_attn`."""

    name, symbol = "a trainer's own GatedDeltaNet", ""  # no symbol: in no hybrid model

    def told(self, layer: Any) -> dict[str, Any]:
        """See Kind: sizes as Megatron's fields, and `own_delta_layers`, counted from 0."""
        module = _own_attention(layer)
        if module is None:
            return {}
        inside = module.linear_attn
        return {
            "linear_num_key_heads": inside.num_k_heads,
            "linear_num_value_heads": inside.num_v_heads,
            "linear_key_head_dim": inside.head_k_dim,
            "linear_value_head_dim": inside.head_v_dim,
            "linear_conv_kernel_dim": inside.conv1d.weight.shape[-1],
            "own_delta_layers": _own_layers(module.hf_config),
        }

    def fills(self, config: Any, layer: int) -> bool:
        """See Kind."""
        return layer in getattr(config, "own_delta_layers", ())

    def work(self, config: Any) -> LayerWork:
        """See Kind; ranks share the work of layers, but each has all of these."""
        return LayerWork(super().work(config).products * config.tensor_model_parallel_size)

    def payload(self, config: Any, sharding: Sharding) -> Payload:
        """See Kind: every tensor-parallel rank has all heads, or context-parallel ranks each have
        a part."""
        return super().payload(config, sharding._replace(tp=1))

    def module_of(self, layer: Any) -> Any | None:
        """See Kind."""
        module = _own_attention(layer)
        if module is None:
            return None
        inside = module.linear_attn
        own = [(module, "forward"), (module, "hf_forward"), (inside, "forward")]
        own.append((inside.conv1d, "forward"))
        return module if all(owner(*method) for method in own) else None

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        """See Kind; the rule is tried, once a process, and so is all around it."""
        from megatron_prefix.features.own_gdn import layer as own_layer
        from megatron_prefix.features.recurrent import probe

        inside, config = module.linear_attn, model.config
        ranks = config.context_parallel_size
        if ranks > 1 and not getattr(module, "hybrid_cp", False):
            yield OWN_DELTA_CUT.given()
        elif ranks > 1 and not _passes_states(module):
            yield OWN_DELTA_CP.given()
        elif inside.num_k_heads % ranks or inside.num_v_heads % ranks:
            yield OWN_DELTA_HEADS.given(
                "GatedDeltaNet", inside.num_k_heads, inside.num_v_heads, ranks
            )
        layers = _own_layers(module.hf_config)
        if module.layer_number - 1 not in layers:
            yield OTHER_MIXER.given(number, type(inside).__name__)
        elif not all(
            any(layer in layers for layer in stage) for stage in _layers_of_stages(config)
        ):
            yield OWN_DELTA_STAGES.given()
        device = next(inside.parameters()).device.type
        sizes = inside.head_k_dim, inside.head_v_dim, max(inside.num_v_heads // ranks, 1)
        if why := probe.tried(own_layer.rule_of(inside), device, *sizes):
            yield DELTA_KERNEL.given("GatedDeltaNet", why)
        elif own_layer.mixes_elsewhere(inside):
            yield OWN_DELTA_MIXES.given(number, type(inside).__name__)

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        """See Kind: it reads none of Megatron's options."""
        yield from ()

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        """See Kind."""
        from megatron_prefix.features.own_gdn.layer import OwnDeltaLayer

        return OwnDeltaLayer(module, number, running).overrides()


def _own_attention(layer: Any) -> Any | None:
    """The self-attention of a layer if it is one of these, whatever its instance overrides."""
    module = getattr(layer, "self_attention", None)
    inside = getattr(module, "linear_attn", None)
    if inside is None:
        return None
    gathers = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), object)
    is_own = (
        gathers.__name__ == "HuggingfaceAttention"
        and _names(type(module), "hf_forward") == _AROUND
        and {_RULE, "conv1d"} <= _names(type(inside), "forward")
        and type(getattr(inside, "conv1d", None)).__name__ == "ShortConvolution"
    )
    return module if is_own else None


def _passes_states(module: Any) -> bool:
    """Whether context-parallel ranks pass states as miles has it: by flash-linear-attention, on
    other positions than attention has."""
    from megatron_prefix.features.own_gdn.layer import CONTEXT, MOVES

    inside = module.linear_attn
    group, num_ranks = getattr(inside, "cp_group", None), module.config.context_parallel_size
    return (
        CONTEXT in _names(type(inside), "forward")
        and {*MOVES} <= _names(type(module), "forward")
        and group is not None
        and group.size() == num_ranks
    )


def _names(kind: type, method: str) -> frozenset[str]:
    """Names that a method of a class reads, without its own variables."""
    code = getattr(getattr(kind, method, None), "__code__", None)
    return frozenset(code.co_names if code is not None else ())


def _own_layers(config: Any) -> frozenset[int]:
    """Layers of a Hugging Face model that have one, as slime and miles read its config."""
    types = getattr(config, "layer_types", None)
    if types is None:
        every = getattr(config, "full_attention_interval", 4)
        return frozenset(n for n in range(config.num_hidden_layers) if (n + 1) % every)
    return frozenset(n for n, kind in enumerate(types) if kind == "linear_attention")


def _layers_of_stages(config: Any) -> Iterator[list[int]]:
    """Layers of every pipeline stage, of its virtual ones together."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    virtual = config.virtual_pipeline_model_parallel_size
    for stage in range(config.pipeline_model_parallel_size):
        result: list[int] = []
        for part in range(virtual) if virtual else (None,):
            start = get_transformer_layer_offset(config, part, stage)
            result += range(start, start + get_num_layers_to_build(config, part, stage))
        yield result
