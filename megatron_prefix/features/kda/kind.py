"""Kimi Delta Attention, and the latent attention beside it: Kimi K3, as trainers build it.  Pure.

Megatron has no class of it. Megatron-Bridge's and miles' are one: `is_kda` says which of the two a
layer has, and the config's `kimi_kda_layers`, counted from 1, where they are. What a span leaves in
the former is what it leaves in GatedDeltaNet, whose decays are one for each number of a key here;
in the latter it is latents and one key part for all heads, which nothing turns.

Layers keep the output of every `kimi_attn_res_block_size` ones, position by position ("attention
residuals"). So a pipeline stage sends as many hidden states of a position, and one more.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.features.mla.kind import MLA
from megatron_prefix.features.recurrent.kind import CHUNK, Recurrent, Shape
from megatron_prefix.layers.attention import Attention
from megatron_prefix.layers.kind import Override, Running, owner
from megatron_prefix.refusals.table import DELTA_KERNEL, KIMI_SUMS, OTHER_MIXER, OWN_DELTA_HEADS

FORWARDS = frozenset(
    {
        "megatron.bridge.models.kimi.kimi_k3_layers.KimiK3Attention",
        "miles_plugins.models.kimi_k3.layers.KimiK3Attention",
    }
)
"""Classes of both kinds of attention; another one adds its name."""
MARK = "sum_gradients_across_tp_domain"
"""Of parameters whose gradients tensor-parallel ranks have parts of."""


class KimiDelta(Recurrent):
    """Their Kimi Delta Attention."""

    name, symbol, cut = "Kimi Delta Attention", "", CHUNK
    divides = "kimi_linear_num_heads", "kimi_linear_num_heads"

    def fills(self, config: Any, layer: int) -> bool:
        return layer + 1 in config.kimi_kda_layers

    def states_sent(self, config: Any, layers: int) -> int:
        """See Kind; behind the last layer all are mixed into one."""
        is_last = layers == config.num_layers
        return 1 if is_last else 1 + -(-layers // config.kimi_attn_res_block_size)

    def shape(self, config: Any) -> Shape:
        """See Recurrent; projected are queries, keys, values, gate, beta and what decays come
        from, which are projected once more."""
        heads, width = config.kimi_linear_num_heads, config.kimi_linear_head_dim
        inner = heads * width
        scan = heads * (3 * width * width + 4 * CHUNK * width) + width * inner
        return Shape(
            (inner, inner, inner, inner, heads, width), (inner, inner, inner), inner,
            config.kimi_linear_conv_kernel_size, inner * width, scan,
        )  # fmt: skip

    def parameters(self, config: Any) -> int:
        width: int = config.kimi_linear_head_dim
        return super().parameters(config) + width * width * config.kimi_linear_num_heads

    def module_of(self, layer: Any) -> Any | None:
        return _attention_of(layer, is_kda=True)

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        """See Kind; on a GPU the rule is tried, once a process."""
        if owner(module, "forward") not in FORWARDS:
            yield OTHER_MIXER.given(number, type(module).__name__)
            return
        yield from unsummed(number, model)
        ranks = model.config.context_parallel_size
        heads = module.local_num_heads
        if heads % ranks:
            yield OWN_DELTA_HEADS.given(self.name, heads, heads, ranks)
        device = next(module.parameters()).device.type
        if device == "cuda":
            from megatron_prefix.features.kda.layer import rule_refusal

            if why := rule_refusal(module, device, max(heads // ranks, 1)):
                yield DELTA_KERNEL.given(self.name, why)

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        from megatron_prefix.features.kda.layer import KimiDeltaLayer

        return KimiDeltaLayer(module, number, running).overrides()


class KimiLatents(MLA):
    """Their latent attention, without positions."""

    name, symbol, forwards = "Kimi's latent attention", "", FORWARDS

    def fills(self, config: Any, layer: int) -> bool:
        return layer + 1 not in config.kimi_kda_layers

    def parameters(self, config: Any) -> int:
        """See Kind; with the gate of its output."""
        gate: int = config.hidden_size * config.num_attention_heads * config.v_head_dim
        return super().parameters(config) + gate

    def module_of(self, layer: Any) -> Any | None:
        return _attention_of(layer, is_kda=False)

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        yield from Attention.refusals(self, number, module, model)
        yield from unsummed(number, model)

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        yield from Attention.option_refusals(self, module, config)

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        from megatron_prefix.features.kda.layer import latent_overrides

        return latent_overrides(module, number, running)


def unsummed(number: int, model: Any) -> Iterator[Reason]:
    """Whether tensor-parallel ranks would keep parts of a gradient, each its own: its parameter
    has a mark that Megatron does not read. Said of the first layer."""
    if number or model.config.tensor_model_parallel_size == 1:
        return
    finalize = import_module("megatron.core.distributed.finalize_model_grads")
    codes = (f.__code__ for f in vars(finalize).values() if inspect.isfunction(f))
    if any(MARK in (*code.co_names, *code.co_consts) for code in codes):
        return
    for name, parameter in model.named_parameters():
        if getattr(parameter, MARK, False) and not getattr(parameter, "sequence_parallel", False):
            yield KIMI_SUMS.given(name)
            return


def _attention_of(layer: Any, *, is_kda: bool) -> Any | None:
    module = getattr(layer, "self_attention", None)
    return module if getattr(module, "is_kda", None) is is_kda else None
