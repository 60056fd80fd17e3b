"""Kimi Delta Attention in a segment, and the latent attention beside it.

Queries, keys and values each have a convolution, a module, and the rule is a function that one of
the trainer's calls: its name is flash-linear-attention's, in the module that it is taken from at
every call. While a segment's layer runs, another one has that name, which gives the rule states.

miles' context-parallel ranks compute contiguous parts of a pack and pass states on. Those of a
segment exchange positions for heads instead (features/own_gdn/heads.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.features.mla.latent import Latents
from megatron_prefix.features.own_gdn.heads import HeadParts, heads_of, of_channels
from megatron_prefix.features.recurrent import probe
from megatron_prefix.features.recurrent.delta import DeltaSpans
from megatron_prefix.features.recurrent.states import LayerStates, segment_of
from megatron_prefix.layers.attention import InSegments
from megatron_prefix.layers.kind import Override, Running
from megatron_prefix.layers.rebound import rebound

KERNELS, RULE = "fla.ops.kda", "chunk_kda"
_MOVES = ("zigzag_to_packed_shard", "packed_shard_to_zigzag")
"""Functions of miles that give context-parallel ranks other positions, and these back."""
_CONTEXT = "build_gdn_cp_context"
_WITHIN = ("_forward_kda", "_kda_core")
"""Methods that may ask for what ranks pass states by."""
_OF_HEADS = ("A_log", "dt_bias")
"""Parameters that the rule is given beside its inputs, of all heads of the rank."""


class KimiDeltaLayer(DeltaSpans):
    """One of them.

    Args:
        module: the self-attention of a layer.
        layer, running: see DeltaSpans.
    """

    def __init__(self, module: Any, layer: int, running: Running) -> None:
        super().__init__(layer, running, getattr(import_module(KERNELS), RULE))
        self._module, self._stock = module, module.forward
        self._group: Any = module.cp_group if module.cp_size > 1 else None
        self._convolutions = module.q_conv1d, module.k_conv1d, module.v_conv1d
        self._within = rebound(module.forward, **dict.fromkeys(_MOVES, _stays))

    def overrides(self) -> Iterator[Override]:
        """Methods of instances, and what takes their place."""
        yield self._module, "forward", self._forward
        for number, convolution in enumerate(self._convolutions):
            stock = convolution.forward
            yield convolution, "forward", functools.partial(self._convolved, number, stock)
        for name in _WITHIN if self._group is not None else ():
            stock = getattr(self._module, name)
            yield self._module, name, self._alone(stock)

    def _alone(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        within = rebound(stock, **{_CONTEXT: lambda *_: None})

        def method(*args: Any, **kwargs: Any) -> Any:
            return (stock if self._running.current is None else within)(*args, **kwargs)

        return method

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._running.current is None:
            return self._stock(*args, **kwargs)
        kernels = sys.modules[KERNELS]
        setattr(kernels, RULE, self._rule)
        try:
            return self._run(self._within, *args, **kwargs)
        finally:
            setattr(kernels, RULE, self.rule)

    def _convolved(
        self, number: int, stock: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Instead of ShortConvolution's forward, x [1, positions, channels]; `number` of it."""
        if self._running.current is None:
            return stock(x, *args, **kwargs)
        self._called.add("convolution")
        convolution, parts = self._convolutions[number], self._parts()
        if parts is not None:
            x, stock = parts.divided(x), of_channels(convolution, self._group).forward
        before, context = convolution.weight.shape[-1] - 1, segment_of(self._running)
        if number == 0:
            states = LayerStates(context, self._layer, x, before)
            context.between["states", self._layer] = states
        states = context.between["states", self._layer]
        width = x.shape[-1]
        tail = slice(number * width, (number + 1) * width)
        y = self._of_row(states, x, before, lambda part: stock(part)[0], tail)
        return (y if parts is None else parts.joined(y)), None

    def _rule(self, *args: Any, **options: Any) -> Any:
        """See DeltaSpans."""
        parts = self._parts()
        if parts is None:
            return super()._rule(*args, **options)
        inputs = self._inputs(args, options)
        size, rank = self._group.size(), self._group.rank()
        options |= {name: options[name].chunk(size)[rank] for name in _OF_HEADS}
        out, _ = super()._rule(*parts.all_divided(inputs), **options)
        return parts.joined(out), None

    def _parts(self) -> HeadParts | None:
        if self._group is None or self._running.current is None:
            return None
        return heads_of(segment_of(self._running), self._group)


class KimiLatentsShared(Latents):
    """The payload of one layer of latent attention, whose projection has all rows on every rank,
    and in which positions turn nothing."""

    projection, sharded = "kv_b_proj", False


def latent_overrides(module: Any, number: int, running: Running) -> list[Override]:
    """Methods of a layer of latent attention, and what takes their place."""
    latents = KimiLatentsShared(module, number, running)
    core = InSegments(module, number, running, latents).forward
    return [(module.core_attention, "forward", core), *latents.overrides()]


def _stays(x: Tensor, *_: Any) -> Tensor:
    return x


def rule_refusal(module: Any, device: str, heads: int) -> str | None:
    """Why the rule cannot be used, from a case that GatedDeltaNet has as well: all numbers of a key
    decay alike. Once a process."""
    return probe.tried(_prepared(module), device, module.head_dim, module.head_dim, heads)


@functools.cache
def rule_with_one_decay(kernels: str) -> Callable[..., Any]:
    """A module's rule, called as GatedDeltaNet's: with one decay for all numbers of a key."""
    rule = getattr(import_module(kernels), RULE)

    def alike(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = rule(
            q, k, v, g.unsqueeze(-1).expand(k.shape).contiguous(), beta, **options
        )
        return result

    return alike


def _prepared(module: Any) -> Callable[..., Any]:
    """The rule, behind one call as the trainer makes it: that leaves out what fla's tuner may not
    choose on some GPUs."""
    weight = module.A_log
    shape = 1, 1, module.local_num_heads, module.head_dim
    x = torch.zeros(shape, dtype=module.config.params_dtype, device=weight.device)
    kda = sys.modules[type(module).__module__].kda
    with torch.no_grad():
        kda(x, x, x, x, x[..., 0].float(), weight, module.dt_bias, module.gate_lower_bound)
    return rule_with_one_decay(KERNELS)
