"""Moves of positions in recurrent layers: their gradients, and the memory that they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_prefix.lab.platforms import cpu, linear_kernels
from megatron_prefix.layers.recurrent import moves
from megatron_prefix.layers.recurrent.spans import Spans
from megatron_prefix.layers.recurrent.states import LayerStates

BEFORE, WIDTH = 3, 4
LENGTHS = pytest.mark.parametrize("lengths", [[9], [5, 4], [1, 2, 3, 9, 1]])
INNER = pytest.mark.parametrize("inner", [False, True])


def random(*shape: int, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()


def spans_of(lengths: list[int]) -> Spans:
    return Spans(lengths, [0] * len(lengths), torch.device("cpu"))


def states_of(lengths: list[int], inner: bool) -> LayerStates:
    context = mock.Mock(spans=spans_of(lengths), inner=inner, backward=False)
    return LayerStates(cast(Any, context), 0, torch.zeros(1), BEFORE)


@contextmanager
def written(size: int) -> Iterator[list[str]]:
    """Names of the operators that write tensors of at least `size` elements."""
    found: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            taken = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if _is(x)}
            for x in tree_leaves(made):
                if _is(x) and x.numel() >= size and x.untyped_storage().data_ptr() not in taken:
                    found.append(func.name())
            return made

    def _is(x: Any) -> bool:
        return isinstance(x, Tensor)

    with Watching():
        yield found


def everything(states: LayerStates, x: Tensor) -> Tensor:
    """Something of everything that comes from `x` at the beginnings and ends of spans."""
    row, edges = states.edges(x)
    return sum(
        (part.sin() * random(*part.shape, seed=n).detach()).sum()
        for n, part in enumerate((row, edges, states._left))
        if part is not None
    )  # type: ignore[return-value]


@INNER
@LENGTHS
def test_gradients_of_beginnings_and_ends(lengths: list[int], inner: bool) -> None:
    x = random(sum(lengths), WIDTH)
    assert torch.autograd.gradcheck(lambda given: everything(states_of(lengths, inner), given), x)


@LENGTHS
def test_gradients_of_batches(lengths: list[int]) -> None:
    spans = spans_of(lengths)
    x, front, still = (
        random(sum(lengths), WIDTH),
        random(len(spans), BEFORE, WIDTH),
        torch.ones(WIDTH),
    )

    def there(*given: Tensor) -> tuple[Tensor, ...]:
        return moves.to_batches(*given, still.double(), spans)

    batches = there(x, front)
    for rows, batch in zip(batches, spans.batches(BEFORE), strict=True):
        for row, number in zip(rows, batch.numbers, strict=True):
            own = x.split(lengths)[number]
            padded = F.pad(own, (0, 0, 0, len(row) - BEFORE - len(own)), value=1.0)
            assert torch.equal(row, torch.cat([front[number], padded]))
    assert torch.equal(moves.from_batches(batches, spans, BEFORE), x)
    assert torch.autograd.gradcheck(there, (x, front))
    given = [batch.detach().clone().requires_grad_() for batch in batches]
    assert torch.autograd.gradcheck(lambda *y: moves.from_batches(y, spans, BEFORE), given)


def test_gradients_of_what_is_overwritten_and_permuted() -> None:
    places, order = torch.tensor([4, 0]), torch.tensor([2, 0, 1])
    y, rows = random(1, 5, WIDTH), random(2, WIDTH)
    assert torch.autograd.gradcheck(
        lambda y, rows: moves.overwritten(y * 1.0, places, rows), (y, rows)
    )
    x = random(3, WIDTH)
    assert torch.autograd.gradcheck(lambda x: moves.permuted(x, order, order.argsort()), x)


def test_an_overwritten_output_that_its_kernel_needs_is_an_error() -> None:
    y = random(1, 5, WIDTH).exp()  # saves what it returns
    changed = moves.overwritten(y, torch.tensor([1]), random(1, WIDTH))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.sum().backward()


@INNER
@LENGTHS
def test_beginnings_and_ends_write_nothing_as_large_as_the_row(
    lengths: list[int], inner: bool
) -> None:
    long = [40 * length for length in lengths]
    x = random(sum(long), WIDTH)
    row, edges = states_of(long, inner).edges(x)
    outputs = [one for one in (row, edges) if one is not None]
    gradients = [torch.ones_like(one) for one in outputs]
    with written(x.numel()) as found:
        torch.autograd.grad(outputs, x, gradients)
        states_of(long, inner).edges(x)
    assert not found


def layer_of(states: LayerStates) -> Any:
    """A GatedDeltaNet's layer with kernels of our own, as far as its convolution goes."""
    cpu.load_recurrent_layers()
    from megatron_prefix.layers.gdn import GatedDeltaLayer

    layer = GatedDeltaLayer.__new__(GatedDeltaLayer)
    layer._layer, layer._running = 0, cast(Any, SimpleNamespace(current=states._context))
    layer._by_channels = mock.Mock(wraps=linear_kernels.causal_conv1d_fn)
    layer._by_positions = mock.Mock(wraps=linear_kernels.causal_conv1d)
    return layer


WEIGHT = random(WIDTH, BEFORE + 1, seed=2).detach()


@INNER
@LENGTHS
def test_a_span_is_convolved_as_if_it_were_alone(lengths: list[int], inner: bool) -> None:
    layer = layer_of(states_of(lengths, inner))
    x = random(1, WIDTH, sum(lengths))
    parts = x.split(lengths, 2)
    wanted = [linear_kernels.causal_conv1d_fn(part, WEIGHT, activation="silu") for part in parts]
    found = layer._convolve_channels(x, WEIGHT, None, "silu")
    torch.testing.assert_close(found, torch.cat(wanted, 2))
    again, _ = layer._convolve_positions(x.mT, WEIGHT, None, "silu")
    torch.testing.assert_close(again.mT, torch.cat(wanted, 2))
    calls = 1 if len(lengths) == 1 else 2  # a lone root is right as it is
    assert layer._by_channels.call_count == layer._by_positions.call_count == calls
    layer._by_channels = None  # without the package causal-conv1d
    torch.testing.assert_close(layer._convolve_channels(x, WEIGHT, None, "silu"), found)


@INNER
@pytest.mark.parametrize(("lengths", "more"), [([200], []), ([120, 80], ["aten::index_fill"])])
def test_a_convolution_writes_no_more_than_the_stock_one(
    lengths: list[int], more: list[str], inner: bool
) -> None:
    """But for a copy of the gradient of what was overwritten, which is Megatron's."""
    x = random(1, WIDTH, sum(lengths))
    layer = layer_of(states_of(lengths, inner))

    def writes(convolve: Callable[..., Tensor]) -> list[str]:
        with written(x.numel()) as found:
            y = convolve(x, WEIGHT, None, activation="silu")
            torch.autograd.grad(y, x, torch.ones_like(y))
        return found

    stock = writes(linear_kernels.causal_conv1d_fn)
    found = writes(layer._convolve_channels)
    for name in stock:
        found.remove(name)
    assert [name.partition(".")[0] for name in found] == more
