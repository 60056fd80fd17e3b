"""The convolution's inputs around the beginnings of spans: what they cost, and their gradients."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_prefix.platforms import cpu, linear_kernels
from megatron_prefix.recurrent.spans import Spans
from megatron_prefix.recurrent.states import LayerStates

BEFORE, CHANNELS = 3, 4


class LargeZeros(TorchDispatchMode):
    """Counts tensors of at least so many zeros that are made."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.found = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.zeros.default, torch.ops.aten.new_zeros.default):
            self.found += made.numel() >= self.least
        return made


def _states(lengths: list[int], inner: bool) -> LayerStates:
    spans = Spans(lengths, [0] * len(lengths), torch.device("cpu"))
    context = mock.Mock(spans=spans, inner=inner, backward=False)
    return LayerStates(cast(Any, context), 0, torch.zeros(1), BEFORE)


def _sum(states: LayerStates, x: Tensor, weight: Tensor) -> Tensor:
    """Something of everything that comes from `x`."""
    row, edges = states.edges(x)
    left = 0.0 if states._left is None else (states._left * weight[: BEFORE * CHANNELS].view(
        BEFORE, CHANNELS
    )).sum()  # fmt: skip
    return row.square().sum() + edges.square().sum() + left


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("lengths", [[5], [1, 2, 3, 9]])
def test_gradients_are_autograds(lengths: list[int], inner: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), CHANNELS, generator=draw, dtype=torch.float64).requires_grad_()
    weight = torch.randn(BEFORE * CHANNELS, generator=draw, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda given: _sum(_states(lengths, inner), given, weight), x)


@pytest.mark.parametrize("inner", [False, True])
def test_no_gradient_of_the_whole_row_is_filled_with_zeros(inner: bool) -> None:
    """They would be written, read and added in every layer: bytes that the stock layer has not."""
    x = torch.randn(200, CHANNELS).requires_grad_()
    row, edges = _states([120, 80], inner).edges(x)
    with LargeZeros(x.numel()) as zeros:
        torch.autograd.grad((row, edges), x, (torch.ones_like(row), torch.ones_like(edges)))
    assert zeros.found == 0


@pytest.mark.parametrize(("lengths", "calls"), [([9], 1), ([5, 4], 2)])
@pytest.mark.parametrize("inner", [False, True])
def test_a_row_of_one_root_is_convolved_once(lengths: list[int], calls: int, inner: bool) -> None:
    """Its first positions see what the whole row's convolution gives them: nothing."""
    cpu.load_recurrent_layers()
    from megatron_prefix.recurrent.gdn import GatedDeltaLayer

    states = _states(lengths, inner)
    layer = GatedDeltaLayer.__new__(GatedDeltaLayer)
    layer._layer, layer._running = 0, lambda: cast(Any, states._context)
    stock = mock.Mock(wraps=linear_kernels.causal_conv1d_fn)
    layer._by_channels = stock
    layer._by_positions = mock.Mock(wraps=linear_kernels.causal_conv1d)
    x, weight = torch.randn(1, CHANNELS, 9), torch.randn(CHANNELS, BEFORE + 1)
    found = layer._convolve_channels(x, weight, None, "silu")
    again, _ = layer._convolve_positions(x.mT, weight, None, "silu")
    parts = x.split(lengths, 2)
    wanted = [linear_kernels.causal_conv1d_fn(part, weight, activation="silu") for part in parts]
    torch.testing.assert_close(found, torch.cat(wanted, 2))
    torch.testing.assert_close(again, torch.cat(wanted, 2).mT)
    assert stock.call_count == layer._by_positions.call_count == calls
