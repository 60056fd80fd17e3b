"""GatedDeltaNet in a segment, Megatron's and trainers' own: convolution and rule, span by span.

The rule takes where sequences begin and end, and a state for each. The convolution runs over the
whole row, which is wrong for the first positions of every span: these are computed again behind
what the parent left. (The convolution of flash-linear-attention 0.4.2 takes states as well, and
gives wrong gradients for sequences under three positions.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_prefix.features.recurrent.moves import overwritten
from megatron_prefix.features.recurrent.states import LayerStates, segment_of, spans_of
from megatron_prefix.layers.kind import Override, Running
from megatron_prefix.layers.rebound import rebound

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext

NUM_INPUTS = 5
"""Queries, keys, values, decays and beta: the first parameters of a gated delta rule."""
_BYPASSED = "GatedDeltaNet has run a segment without the replaced kernels"


class DeltaSpans:
    """The convolution and the rule of one layer while a segment runs.

    Args:
        rule: the layer's, with the signature of flash-linear-attention's.

    Attributes:
        rule: as given.
    """

    def __init__(self, layer: int, running: Running, rule: Callable[..., Any]) -> None:
        self._layer, self._running, self.rule = layer, running, rule
        self._names = parameters_of(rule)
        # Else flash-linear-attention reads the lengths back from the device, and the host waits.
        self._takes_lengths = "cu_seqlens_cpu" in self._names
        self._called = set[str]()

    def _run(self, within: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._called.clear()
        output = within(*args, **kwargs)
        # Where one runs without the other its states are missed; but neither runs with a tap.
        needed = {"convolution"} if self._running.tap is None else {"convolution", "rule"}
        if not needed <= self._called:
            raise RuntimeError(_BYPASSED)
        return output

    def _convolve(self, x: Tensor, before: int, stock: Callable[[Tensor], Tensor]) -> Tensor:
        """A row's convolution, span by span.

        Args:
            x: [1, positions, channels].
            before: positions that the convolution looks back.
            stock: the convolution of [rows, positions, channels].
        """
        self._called.add("convolution")
        context = segment_of(self._running)
        states = LayerStates(context, self._layer, x, before)
        context.between["states", self._layer] = states
        return self._of_row(states, x, before, stock)

    @staticmethod
    def _of_row(
        states: LayerStates, x: Tensor, before: int, stock: Callable[[Tensor], Tensor],
        part: slice | None = None,
    ) -> Tensor:  # fmt: skip
        """See `_convolve`; `part`: channels of a layer's that `x` has, where it has several
        convolutions."""
        row, edges = states.edges(x.squeeze(0), part=part)
        y = stock(row.unsqueeze(0))
        if edges is None:
            return y
        ends = states.spans.edges(before)
        boundary_rows = stock(edges)[:, before:].flatten(0, 1)
        if ends.kept is not None:
            boundary_rows = boundary_rows.index_select(0, ends.kept)
        return overwritten(y, ends.first, boundary_rows, ends.repeats)

    def _rule(self, *args: Any, **options: Any) -> Any:
        """Instead of `chunk_gated_delta_rule`, [1, positions, heads, dim]; Megatron gives inputs
        by position, or since 0.20 by name."""
        if self._running.current is None:
            return self.rule(*args, **options)
        self._called.add("rule")
        names, inputs = self._names[:NUM_INPUTS], self._inputs(args, options)
        if (tap := self._running.tap) is not None:

            def again(*inputs: Tensor, **_: Any) -> Tensor:
                out: Tensor = self._rule(*inputs, **options)[0]
                return out

            return tap(again, inputs, inputs[2].shape), None
        states = segment_of(self._running).between.pop(("states", self._layer), None)
        if states is None:
            raise RuntimeError(_BYPASSED)
        options |= {
            "initial_state": states.state,
            "output_final_state": states.inner,
            **dict(zip(names, inputs, strict=True)),
        }
        out, final = states.spans.run(self.rule, options, self._takes_lengths)
        return states.leave(out, final), None

    def _inputs(self, args: Sequence[Any], options: dict[str, Any]) -> list[Tensor]:
        """What the rule mixes: taken out of its options, which get all arguments by name."""
        options |= zip(self._names, args, strict=False)
        return [options.pop(name) for name in self._names[:NUM_INPUTS]]

    @staticmethod
    def _packing(context: SegmentContext) -> PackedSeqParams:
        """A segment's spans as Megatron's packed sequences: context parallelism deals each to ranks
        by itself."""
        ends = spans_of(context).cu_seqlens.int()
        return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)


class GatedDeltaLayer(DeltaSpans):
    """One GatedDeltaNet of Megatron's."""

    def __init__(self, module: Any, layer: int, running: Running) -> None:
        kernels = module.forward.__func__.__globals__
        rule = kernels.get("chunk_gated_delta_rule")
        super().__init__(layer, running, getattr(module, "gated_delta_rule", rule))  # since 0.18
        self._module, self._stock = module, module.forward
        self._by_channels = kernels.get("causal_conv1d_fn")
        self._by_positions = kernels.get("causal_conv1d")
        self._within = rebound(
            module.forward,
            causal_conv1d_fn=self._convolve_channels,
            causal_conv1d=self._convolve_positions,
            chunk_gated_delta_rule=self._rule,
        )

    def overrides(self) -> list[Override]:
        overrides: list[Override] = [(self._module, "forward", self._forward)]
        if hasattr(self._module, "gated_delta_rule"):
            overrides.append((self._module, "gated_delta_rule", self._rule))
        return overrides

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        context = self._running.current
        if context is None:
            return self._stock(*args, **kwargs)
        if getattr(self._module, "cp_size", 1) > 1:
            kwargs = {**kwargs, "packed_seq_params": self._packing(context)}
        return self._run(self._within, *args, **kwargs)

    def _convolve_channels(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **_: Any
    ) -> Tensor:
        """Instead of causal-conv1d's `causal_conv1d_fn`, x [1, channels, positions]."""
        output = self._behind(self._convolve_channels, x, weight, bias, activation)
        if output is not None:
            return output
        before = weight.shape[1] - 1

        def stock(part: Tensor) -> Tensor:
            part = part.mT.contiguous()
            if self._by_channels is None:  # as Megatron does then
                longer = F.conv1d(part, weight[:, None], bias, padding=before, groups=len(weight))
                return F.silu(longer[..., : part.shape[2]]).mT
            y: Tensor = self._by_channels(x=part, weight=weight, bias=bias, activation=activation)
            return y.mT

        return self._convolve(x.mT, before, stock).mT

    def _convolve_positions(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **_: Any
    ) -> tuple[Tensor, None]:
        """Instead of flash-linear-attention's `causal_conv1d`, x [1, positions, channels]."""

        def alone(*given: Any) -> Tensor:
            return self._convolve_positions(*given)[0]

        if (found := self._behind(alone, x, weight, bias, activation)) is not None:
            return found, None

        def stock(part: Tensor) -> Tensor:
            output = self._by_positions(x=part, weight=weight, bias=bias, activation=activation)
            y: Tensor = output[0]
            return y

        return self._convolve(x, weight.shape[1] - 1, stock), None

    def _behind(
        self,
        convolve: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
    ) -> Tensor | None:
        """With a tap what a convolution will make of `x`, with the weights that its module has
        then; None without.

        Raises:
            RuntimeError: the layer uses others.
        """
        if (tap := self._running.tap) is None:
            return None
        self._called.add("convolution")
        module = self._module.conv1d
        pairs = (weight, module.weight), (bias, module.bias)
        if any(first is not second and _tensors_differ(first, second) for first, second in pairs):
            raise RuntimeError("a convolution has other weights than its module")

        def again(x: Tensor, **_: Any) -> Tensor:
            return convolve(x, module.weight.squeeze(1), module.bias, activation)

        return tap(again, [x], x.shape)


def parameters_of(rule: Callable[..., Any]) -> list[str]:
    """Names of a gated delta rule's parameters, its inputs first; flash-linear-attention's for a
    wrapper that hides them."""
    names = [*inspect.signature(rule).parameters]
    return names if len(names) >= NUM_INPUTS else ["q", "k", "v", "g", "beta", *names]


def _tensors_differ(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return True
    return first.data_ptr() != second.data_ptr() or first.numel() != second.numel()
