"""Moves of positions in recurrent layers: their gradients, and the memory that they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_prefix.features.recurrent import moves
from megatron_prefix.features.recurrent.definition import chunk_gated_delta_rule  # noqa: F401  # its module has it
from megatron_prefix.features.recurrent.spans import Spans
from megatron_prefix.features.recurrent.states import LayerStates
from megatron_prefix.lab.platforms import cpu
from megatron_prefix.lab.platforms.linear_kernels import causal_conv1d, causal_conv1d_fn

BEFORE, WIDTH = 3, 4
LENGTHS = pytest.mark.parametrize("lengths", [[9], [5, 4], [1, 2, 3, 9, 1]])
INNER = pytest.mark.parametrize("inner", [False, True])


def random(*shape: int, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()


def spans_of(lengths: list[int]) -> Spans:
    return Spans(lengths, [0] * len(lengths), torch.device("cpu"))


def segment_of(lengths: list[int], inner: bool) -> Any:
    return mock.Mock(inner=inner, backward=False, between={("spans", None): spans_of(lengths)})


def states_of(lengths: list[int], inner: bool) -> LayerStates:
    return LayerStates(segment_of(lengths, inner), 0, torch.zeros(1), BEFORE)


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


@INNER
@LENGTHS
def test_gradients_of_beginnings_and_ends(lengths: list[int], inner: bool) -> None:
    def edges(x: Tensor) -> tuple[Tensor, ...]:
        found = states_of(lengths, inner).edges(x)
        return tuple(part for part in found if part is not None)

    assert torch.autograd.gradcheck(edges, random(sum(lengths), WIDTH))


@LENGTHS
def test_a_span_leaves_its_last_inputs(lengths: list[int]) -> None:
    """Zeros before them where it is short; and they get the gradient that its children send."""
    segment, x = segment_of(lengths, inner=True), random(sum(lengths), WIDTH)
    states = LayerStates(segment, 0, torch.zeros(1), BEFORE)
    row, _ = states.edges(x)
    state, sent = torch.zeros(1), random(len(lengths), BEFORE, WIDTH, seed=2).detach()
    segment.cache.take.return_value = state, sent
    states.leave(row * 0.0, state).sum().backward()
    twin = x.detach().requires_grad_()
    tails = [F.pad(part, (0, 0, BEFORE, 0))[-BEFORE:] for part in twin.split(lengths)]
    (_, _, (_, tail)), _ = segment.cache.capture.call_args
    assert torch.equal(tail, torch.stack(tails))
    torch.stack(tails).backward(sent)
    assert torch.equal(x.grad, twin.grad)


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


class Mixer:
    """The part of a GatedDeltaNet that calls a convolution, by the global names of its module."""

    def __init__(self, positions_first: bool) -> None:
        self.positions_first = positions_first

    def forward(self, x: Tensor) -> Tensor:
        if self.positions_first:
            return causal_conv1d(x.mT, WEIGHT, None, activation="silu")[0].mT
        return causal_conv1d_fn(x, WEIGHT, None, activation="silu")


def convolution_of(
    lengths: list[int], inner: bool, positions_first: bool = False
) -> Callable[[Tensor], Tensor]:
    """The convolution of a GatedDeltaNet's layer, in a segment with spans of these lengths."""
    cpu.load_recurrent_layers()
    from megatron_prefix.features.recurrent.delta import GatedDeltaLayer

    running = SimpleNamespace(current=segment_of(lengths, inner), tap=None)
    ((_, name, forward),) = GatedDeltaLayer(Mixer(positions_first), 0, running).overrides()
    assert name == "forward"
    return forward


WEIGHT = random(WIDTH, BEFORE + 1, seed=2).detach()


@INNER
@LENGTHS
def test_a_span_is_convolved_as_if_it_were_alone(
    lengths: list[int], inner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = random(1, WIDTH, sum(lengths))
    parts = x.split(lengths, 2)
    wanted = torch.cat([causal_conv1d_fn(part, WEIGHT, activation="silu") for part in parts], 2)
    for positions_first, kernel in enumerate((causal_conv1d_fn, causal_conv1d)):
        calls = mock.Mock(wraps=kernel)
        monkeypatch.setitem(globals(), kernel.__name__, calls)
        found = convolution_of(lengths, inner, bool(positions_first))(x)
        torch.testing.assert_close(found, wanted)
        # A lone root is right as it is.
        assert calls.call_count == (1 if len(lengths) == 1 else 2)
    # Without the package causal-conv1d.
    monkeypatch.setitem(globals(), "causal_conv1d_fn", None)
    torch.testing.assert_close(convolution_of(lengths, inner)(x), wanted)


@INNER
@pytest.mark.parametrize(("lengths", "more"), [([200], []), ([120, 80], ["aten::index_fill"])])
def test_a_convolution_writes_no_more_than_the_stock_one(
    lengths: list[int], more: list[str], inner: bool
) -> None:
    """But for a copy of the gradient of what was overwritten, which is Megatron's."""
    x = random(1, WIDTH, sum(lengths))

    def writes(convolve: Callable[[Tensor], Tensor]) -> list[str]:
        with written(x.numel()) as found:
            y = convolve(x)
            torch.autograd.grad(y, x, torch.ones_like(y))
        return found

    stock = writes(Mixer(positions_first=False).forward)
    found = writes(convolution_of(lengths, inner))
    for name in stock:
        found.remove(name)
    assert [name.partition(".")[0] for name in found] == more
