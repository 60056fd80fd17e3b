"""Megatron's MambaMixer in a segment: its fused convolution and scan, a span a row.

The kernel takes an initial state for every row of a batch, and none for the convolution. So the
parent's last inputs go in front of a span, with a time step of softplus(-1e4) = 0, which leaves the
state as it is; so does what pads a shorter row behind its end, where the state is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_prefix.recurrent.gdn import Override, Running
from megatron_prefix.recurrent.rebound import rebound
from megatron_prefix.recurrent.states import LayerStates

if TYPE_CHECKING:
    from megatron_prefix.attention.core import SegmentContext
    from megatron_prefix.recurrent.spans import Batch

NO_STEP = -1e4
"""A time step's input that is zero behind softplus, whatever its bias."""


class MambaLayer:
    """One MambaMixer.

    Args:
        module: Megatron's.
        layer: its number in the sidecar.
        running: the segment that runs.
    """

    def __init__(self, module: Any, layer: int, running: Running) -> None:
        self._module, self._layer, self._running = module, layer, running
        self._stock = module._ssm_training
        kernels = self._stock.__func__.__globals__
        self._stock_scan = kernels["mamba_split_conv1d_scan_combined"]
        self._within = rebound(self._stock, mamba_split_conv1d_scan_combined=self._scan)

    def overrides(self) -> list[Override]:
        """Methods of instances, and what takes their place."""
        found: list[Override] = [
            (self._module, "_ssm_training", self._choosing(self._stock, self._within))
        ]
        if self._module.cp.cp_size > 1:
            for name in ("pre_conv_ssm", "post_conv_ssm"):
                stock = getattr(self._module.cp, name)
                within = rebound(
                    stock,
                    _undo_attention_load_balancing=self._in_order,
                    _redo_attention_load_balancing=self._dealt,
                )
                found.append((self._module.cp, name, self._choosing(stock, within)))
        return found

    def _choosing(self, stock: Any, within: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            return (stock if self._running() is None else within)(*args, **kwargs)

        return method

    def _in_order(self, x: Tensor, size: int, *_: Any) -> Tensor:
        """Positions of all ranks [positions, ...] in order: Megatron does it for one sequence, and
        each span is dealt by itself (tree/cp_layout.py)."""
        return x.index_select(0, self._context().spans.dealt(size)[0])

    def _dealt(self, x: Tensor, size: int, *_: Any) -> Tensor:
        """The reverse of `_in_order`."""
        return x.index_select(0, self._context().spans.dealt(size)[1])

    def _context(self) -> SegmentContext:
        context = self._running()
        if context is None:
            raise RuntimeError("a segment ended inside a recurrent layer")
        return context

    def _scan(
        self,
        zxbcdt: Tensor,
        weight: Tensor,
        bias: Tensor,
        dt_bias: Tensor,
        *rest: Any,
        **given: Any,
    ) -> Tensor:
        """In the place of `mamba_split_conv1d_scan_combined`, zxbcdt [1, positions, width]."""
        context = self._context()
        x, before, channels = zxbcdt[0], weight.shape[1] - 1, weight.shape[0]
        inner = x.shape[1] - channels - len(dt_bias)
        states = LayerStates(context, self._layer, x, before)
        tail = states.edges(x[:, inner : inner + channels])[:, :before]
        front = F.pad(F.pad(tail, (inner, 0)), (0, len(dt_bias)), value=NO_STEP)
        outs, finals = [], []
        for batch in states.spans.batches:
            state = None if states.state is None else states.state.index_select(0, batch.spans)
            rows = torch.cat([front.index_select(0, batch.spans), _rows(x, batch, len(dt_bias))], 1)
            found = self._stock_scan(
                rows, weight, bias, dt_bias, *rest,
                **{**given, "initial_states": state, "return_final_states": context.inner},
            )  # fmt: skip
            out, final = found if context.inner else (found, None)
            outs.append(out.flatten(0, 1))
            finals.append(final)
        out = torch.cat(outs).index_select(0, states.spans.unbatched(before)).unsqueeze(0)
        return states.leave(out, _by_span(context, finals))


def _rows(x: Tensor, batch: Batch, heads: int) -> Tensor:
    """The positions of a batch's spans, [rows, longest, width]; padding makes no step."""
    rows = x.index_select(0, batch.positions).unflatten(0, (-1, batch.longest))
    if batch.padding is None:
        return rows
    still = F.pad(x.new_zeros(x.shape[1] - heads), (0, heads), value=NO_STEP)
    return torch.where(batch.padding[..., None], still, rows)


def _by_span(context: SegmentContext, finals: list[Any]) -> Tensor | None:
    """States of all spans, from those of the batches."""
    if not context.inner:
        return None
    return torch.cat(finals).index_select(0, context.spans.order)
