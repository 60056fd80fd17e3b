"""Linear layers in FP8 with scales of blocks, emulated on the CPU.

What transformer-engine's `Float8BlockScaling` rounds is rounded in the same blocks (1 x 128 of a
row of activations and of gradients, 128 x 1 of their columns for gradients of weights, 128 x 128 of
weights; scales are powers of two), and what its `MXFP8BlockScaling` rounds in its own: 1 x 32 and
32 x 1, of weights, too. Products and sums are exact for fp64.
"""

import contextlib
from typing import NamedTuple
from unittest import mock

import torch
from megatron.core.tensor_parallel import layers

LARGEST = 448.0


class Recipe(NamedTuple):
    """Blocks that have a scale.

    Attributes:
        block: numbers of a row, or of a column.
        square: whether a weight's are as high as they are wide.
        least: of rows, that transformer-engine takes multiples of.
    """

    block: int
    square: bool
    least: int


BLOCKWISE, MX = Recipe(128, square=True, least=16), Recipe(32, square=False, least=32)


def rounded(x, rows, columns):
    """A matrix as e4m3 with one scale for each block of so many rows and columns."""
    height, width = x.shape
    padded = torch.nn.functional.pad(x, (0, -width % columns, 0, -height % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-30)
    scale = torch.exp2(torch.floor(torch.log2(LARGEST / largest)))
    nearest = (blocks * scale).float().to(torch.float8_e4m3fn).to(x.dtype) / scale
    return nearest.flatten(2).flatten(0, 1)[:height, :width]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, backward, recipe):
        ctx.save_for_backward(x, weight)
        ctx.backward, ctx.recipe = backward, recipe
        block, high = recipe.block, recipe.block if recipe.square else 1
        product = rounded(x.flatten(0, -2), 1, block) @ rounded(weight, high, block).t()
        return product.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, *gradients):
        x, weight = ctx.saved_tensors
        gradient, block = gradients[0].flatten(0, -2), ctx.recipe.block
        weight = rounded(weight, block, block if ctx.recipe.square else 1)
        if not ctx.backward:
            return (gradient @ weight).view_as(x), gradient.t() @ x.flatten(0, -2), None, None
        back = rounded(gradient, 1, block) @ weight
        columns = rounded(gradient, block, 1), rounded(x.flatten(0, -2), block, 1)
        return back.view_as(x), columns[0].t() @ columns[1], None, None


@contextlib.contextmanager
def emulated(model, recipe=BLOCKWISE, *, backward=True):
    """Linear layers of a language model's decoder are in FP8 meanwhile, in a world of one rank.
    Without `backward` gradients are not rounded: those of the forward that is there.

    Yields the numbers of rows that they have got. Raises where transformer-engine would.
    """
    inside = {id(parameter) for parameter in model.decoder.parameters()}
    stock = layers.linear_with_grad_accumulation_and_async_allreduce
    got = []

    def linear(input, weight, bias, *rest, **more):
        if id(weight) not in inside:
            return stock(input, weight, bias, *rest, **more)
        got.append(input.shape[:-1].numel())
        if got[-1] % recipe.least or bias is not None:
            raise ValueError(f"{got[-1]} rows, bias {bias}")
        return _Linear.apply(input, weight, backward, recipe)

    linear.warned = True
    name = "linear_with_grad_accumulation_and_async_allreduce"
    with mock.patch.object(layers, name, linear):
        yield got
