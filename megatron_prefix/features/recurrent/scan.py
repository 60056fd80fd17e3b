"""Megatron's MambaMixer in a segment: its fused convolution and scan, a span a row.

The kernel takes an initial state for every row of a batch, and none for the convolution. So the
parent's last inputs go in front of a span, with a time step of softplus(-1e4) = 0, which leaves the
state as it is; so does what pads a shorter row behind its end, where the state is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_prefix.features.recurrent.moves import from_batches, permuted, to_batches
from megatron_prefix.features.recurrent.states import LayerStates, segment_of, spans_of
from megatron_prefix.layers.kind import Override, Running
from megatron_prefix.layers.rebound import rebound

NO_STEP = -1e4
"""A time step's input that is zero behind softplus, whatever its bias."""


class MambaLayer:
    """One MambaMixer."""

    def __init__(self, module: Any, layer: int, running: Running) -> None:
        self._module, self._layer, self._running = module, layer, running
        self._stock = module._ssm_training
        kernels = self._stock.__func__.__globals__
        self._stock_scan = kernels["mamba_split_conv1d_scan_combined"]
        self._within = rebound(self._stock, mamba_split_conv1d_scan_combined=self._scan)

    def overrides(self) -> list[Override]:
        overrides: list[Override] = [
            (self._module, "_ssm_training", self._choosing(self._stock, self._trained))
        ]
        if self._module.cp.cp_size > 1:
            for name in ("pre_conv_ssm", "post_conv_ssm"):
                stock = getattr(self._module.cp, name)
                within = rebound(
                    stock,
                    _undo_attention_load_balancing=self._in_order,
                    _redo_attention_load_balancing=self._dealt,
                )
                overrides.append((self._module.cp, name, self._choosing(stock, within)))
        return overrides

    def _trained(self, zxbcdt: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`_ssm_training` of [positions, 1, width] in a segment: also the norm behind the kernel,
        as what the kernel takes is made of parameters in this method."""
        if (tap := self._running.tap) is None:
            return self._within(zxbcdt, *args, **kwargs)

        def again(zxbcdt: Tensor, **_: Any) -> Tensor:
            # The next layer's is put in the same place.
            is_one_root = spans_of(segment_of(self._running)).is_one_root
            return self._within(zxbcdt.clone() if is_one_root else zxbcdt, *args, **kwargs)

        shape = len(zxbcdt), 1, self._module.cp.d_inner_local_tpcp
        return tap(again, [], shape, [zxbcdt])

    def _choosing(self, stock: Any, within: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            return (stock if self._running.current is None else within)(*args, **kwargs)

        return method

    def _in_order(self, x: Tensor, size: int, *_: Any) -> Tensor:
        """Positions of all ranks [positions, ...] in order: Megatron does it for one sequence, and
        each span is dealt by itself (tree/cp_layout.py)."""
        return permuted(x, *spans_of(segment_of(self._running)).dealt(size))

    def _dealt(self, x: Tensor, size: int, *_: Any) -> Tensor:
        return permuted(x, *reversed(spans_of(segment_of(self._running)).dealt(size)))

    def _scan(
        self,
        zxbcdt: Tensor,
        weight: Tensor,
        bias: Tensor,
        dt_bias: Tensor,
        *rest: Any,
        **given: Any,
    ) -> Tensor:
        """Instead of `mamba_split_conv1d_scan_combined`, zxbcdt [1, positions, width]."""
        context = segment_of(self._running)
        x, before, channels = zxbcdt.squeeze(0), weight.shape[1] - 1, weight.shape[0]
        num_heads_and_gates = x.shape[1] - channels - len(dt_bias)
        states = LayerStates(context, self._layer, x, before)
        if states.inner:
            x, _ = states.edges(x, slice(num_heads_and_gates, num_heads_and_gates + channels))
        outs, finals = [], []
        for rows, state in _convolution_rows(states, x, before, num_heads_and_gates, len(dt_bias)):
            output = self._stock_scan(
                rows, weight, bias, dt_bias, *rest,
                **{**given, "initial_states": state, "return_final_states": states.inner},
            )  # fmt: skip
            out, final = output if states.inner else (output, None)
            outs.append(out)
            finals.append(final)
        if states.spans.is_one_root:
            return states.leave(outs[0], finals[0])
        out = from_batches(outs, states.spans, before).unsqueeze(0)
        return states.leave(out, _rows_by_span(states, finals))


def _convolution_rows(
    states: LayerStates, x: Tensor, before: int, left: int, heads: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Batches of spans behind their parents' tails, and the states that they begin with.

    Args:
        x: of all spans, [positions, width].
        left: columns of `x` in front of the convolution's channels.
        heads: columns behind them: time steps.
    """
    spans = states.spans
    if spans.is_one_root:  # nothing is in front of it
        yield x.unsqueeze(0), None
        return
    tail = states.tail
    if tail is None:
        tail = x.new_zeros(len(spans), before, x.shape[1] - left - heads)
    front = F.pad(F.pad(tail, (left, 0)), (0, heads), value=NO_STEP)
    still = F.pad(x.new_zeros(x.shape[1] - heads), (0, heads), value=NO_STEP)
    batches = spans.batches(before)
    for rows, batch in zip(to_batches(x, front, still, spans), batches, strict=True):
        yield rows, None if states.state is None else states.state.index_select(0, batch.spans)


def _rows_by_span(states: LayerStates, finals: list[Any]) -> Tensor | None:
    if not states.inner:
        return None
    return torch.cat(finals).index_select(0, states.spans.order)
