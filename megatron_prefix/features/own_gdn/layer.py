"""A trainer's own GatedDeltaNet in a segment (kind.py): three methods of instances.

The outer module is given the segment's spans as a pack. Inside, the convolution is a module, and
the rule a global name or an attribute. Context-parallel ranks divide heads among them in both
(heads.py), and positions elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.device import tolerance
from megatron_prefix.features.own_gdn.heads import HeadParts, heads_of, of_channels
from megatron_prefix.features.recurrent.delta import DeltaSpans, parameters_of
from megatron_prefix.features.recurrent.states import segment_of
from megatron_prefix.layers.kind import Override, Running
from megatron_prefix.layers.rebound import rebound

_RULE = "chunk_gated_delta_rule"
MOVES = ("_zigzag_to_packed_shard", "_packed_shard_to_zigzag")
"""Functions of miles that give context-parallel ranks other positions, and these back."""
CONTEXT = "build_gdn_cp_context"
"""miles' function, which returns what context-parallel ranks pass states by; None: they do not."""


class OwnDeltaLayer(DeltaSpans):
    """One of them.

    Args:
        module: the self-attention of a layer, with a `linear_attn`.
        layer, running: see DeltaSpans.
    """

    def __init__(self, module: Any, layer: int, running: Running) -> None:
        inside = module.linear_attn
        super().__init__(layer, running, rule_of(inside))
        self._module, self._inside = module, inside
        self._stock, self._stock_inside = module.forward, inside.forward
        self._stock_convolution = inside.conv1d.forward
        self._on_own_positions = rebound(module.forward, **dict.fromkeys(MOVES, _stays))
        self._within = _alone(inside, self._rule)

    def overrides(self) -> list[Override]:
        """Methods of instances, and what takes their place."""
        result: list[Override] = [
            (self._module, "forward", self._forward),
            (self._inside, "forward", self._forward_inside),
            (self._inside.conv1d, "forward", self._convolved),
        ]
        if hasattr(self._inside, _RULE):
            result.append((self._inside, _RULE, self._rule))
        return result

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        context = self._running.current
        if context is None:
            return self._stock(*args, **kwargs)
        return self._on_own_positions(
            *args, **{**kwargs, "packed_seq_params": self._packing(context)}
        )

    def _forward_inside(self, *args: Any, **kwargs: Any) -> Any:
        if self._running.current is None:
            return self._stock_inside(*args, **kwargs)
        return self._run(self._within, *args, **kwargs)

    def _convolved(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Instead of ShortConvolution's forward, x [1, positions, channels]."""
        if self._running.current is None:
            return self._stock_convolution(x, *args, **kwargs)
        before = self._inside.conv1d.weight.shape[-1] - 1
        parts, convolution = self._parts(), self._stock_convolution
        if parts is None:
            return self._convolve(x, before, lambda part: convolution(part)[0]), None
        convolution = of_channels(self._inside.conv1d, self._inside.cp_group).forward
        y = self._convolve(parts.divided(x), before, lambda part: convolution(part)[0])
        return parts.joined(y), None

    def _rule(self, *args: Any, **options: Any) -> Any:
        """See DeltaSpans."""
        parts = self._parts()
        if parts is None:
            return super()._rule(*args, **options)
        inputs = self._inputs(args, options)
        out, _ = super()._rule(*parts.all_divided(inputs), **options)
        return parts.joined(out), None

    def _parts(self) -> HeadParts | None:
        """What context-parallel ranks exchange heads by; None on a single rank."""
        group = getattr(self._inside, "cp_group", None)
        if group is None or group.size() == 1 or self._running.current is None:
            return None
        return heads_of(segment_of(self._running), group)


def _stays(x: Tensor, *_: Any) -> Tensor:
    return x


def _alone(inside: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a `linear_attn` with another rule, which passes no states between ranks."""
    return rebound(inside.forward, **{_RULE: rule, CONTEXT: lambda *_: None})


def rule_of(inside: Any) -> Callable[..., Any]:
    """The gated delta rule that a `linear_attn` calls: of its own, or of its file."""
    own = getattr(inside, _RULE, None)
    result: Callable[..., Any] = own or inside.forward.__func__.__globals__[_RULE]
    return result


@torch.no_grad()
def mixes_elsewhere(inside: Any) -> bool:
    """Whether positions see one another outside of the convolution and the rule, or that cannot be
    told: with others in their place that keep positions apart, pieces give what the whole gives."""
    convolution = inside.conv1d
    inputs = next(child for child in inside.children() if isinstance(child, torch.nn.Linear))
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(1, 12, inputs.in_features, generator=draw).to(inputs.weight)

    names = parameters_of(rule_of(inside))

    def apart(*args: Any, **options: Any) -> Any:
        inputs = dict(zip(names, args, strict=False)) | options
        query, key, value = (inputs[name] for name in names[:3])
        return value + query.sum(-1, keepdim=True) * key.mean(-1, keepdim=True), None

    def run(part: Tensor) -> Tensor:
        result: Tensor = forward(
            hidden_states=part, cu_seqlens=torch.tensor([0, part.shape[1]], device=x.device)
        )
        return result

    forward = _alone(inside, apart)
    own = vars(inside).get(_RULE)
    convolution.forward = lambda x, **_: (x, None)
    if own is not None:
        vars(inside)[_RULE] = apart
    try:
        full, pieces = run(x), torch.cat([run(part) for part in x.split((5, 7), 1)], 1)
        error = tolerance.relative_error(pieces, full)
    except Exception:  # noqa: BLE001  # it is called otherwise, or returns something else
        return True
    finally:
        del convolution.forward
        if own is not None:
            vars(inside)[_RULE] = own
    return not error <= tolerance.tolerance(x.dtype, 12, inputs.in_features, 1)
