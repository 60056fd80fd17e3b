"""FP8 with scales of blocks: rows are the stock schedule's, gradients as near the exact ones."""

import contextlib
import math
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.lab.cli.matrix import align_row
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.numerics import policy
from megatron_prefix.lab.numerics.compare import Verdict
from megatron_prefix.lab.numerics.pooled import Errors
from megatron_prefix.lab.rl import batches, packing
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.verify import align
from megatron_prefix.lab.verify.matrix import Row
from megatron_prefix.layers import precision
from megatron_prefix.megatron.stock import stock_schedule
from tests.harness.one_rank import change_rank, one_rank, small_model

LARGEST = 448.0


class Recipe(NamedTuple):
    """Blocks that have a scale."""

    block: int  # numbers of a row, or of a column
    square: bool  # whether a weight's are as high as they are wide
    least: int  # of rows, that transformer-engine takes multiples of


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
    stock, got = layers.linear_with_grad_accumulation_and_async_allreduce, []

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


ROWS = ("dense/CP2/tree/none", "moe/EP2/packed/none")


@pytest.mark.parametrize("name", ROWS)
def test_whole_segments_change_nothing(name, monkeypatch):
    """In fp64, padded as for FP8."""

    def rows(config, sequence_ranks):
        return 16 * sequence_ranks

    def whole(config, sequence_ranks, cp_size):
        return 16 * sequence_ranks * cp_size

    monkeypatch.setattr(precision, "row_multiple", rows)
    monkeypatch.setattr(precision, "segment_multiple", whole)
    verdict = align_row(Row(*name.split("/")), timeout_s=120)
    assert verdict.passed, verdict.failures
    assert verdict.grad_max_rel_diff <= verdict.tolerance < 1e-12
    assert verdict.executed_tokens < verdict.raw_tokens


def _zero_sum(draw, num):
    values = draw.standard_normal(num)
    return values - values.mean()


def _of_one_sign(draw, num):
    return 1 + 0.1 * draw.standard_normal(num)


def _items(advantages, seed, recipe=BLOCKWISE):
    draw, items = np.random.default_rng(seed), []
    for group in generate(2, 140, 23, 7, vocab_size=64, seed=seed):
        values = advantages(draw, len(group.rollouts)).tolist()
        pairs = zip(group.rollouts, values, strict=True)
        items += [batches.microbatch(one, value, multiple=recipe.least) for one, value in pairs]
    return packing.microbatches(items, Baseline("packed", pack_tokens=1000))


class Ran:
    """Steps of both schedules in FP8, each with its own tokens and advantages: as a `verdict` their
    errors against products that are not rounded, as the lab judges them; as `ratios` those of a
    layer's weights in a backward alone, pooled over steps; and the last step's traces."""

    def __init__(self, advantages, limit, recipe, draws=3):
        self._model = small_model(spec={"hidden_size": 128, "ffn_hidden_size": 256})
        self.ours = PrefixSchedule(PrefixConfig(mode="on", min_gain=0, kernel="math"))
        errors, squares = Errors(limit), dict[str, list[np.ndarray]]()
        for seed in range(draws):
            items = _items(advantages, seed, recipe)
            with emulated(unwrap(self._model), recipe):
                stock, ours = (self._step(one, items) for one in (stock_schedule(), self.ours))
            with emulated(unwrap(self._model), recipe, backward=False):
                truth = self._step(stock_schedule(), items).gradients
            self.traces = stock, ours, self._step(stock_schedule(), items)
            errors.add(*self.traces)
            for name, gradient in truth.items():
                if "decoder" in name and "linear" in name:
                    off = (float((one.gradients[name] - gradient).norm()) for one in (stock, ours))
                    squares.setdefault(name, []).append(np.array([*off]) ** 2)
        self.verdict = errors.judged(Verdict(0.0, 0.0, 0.0, 0.0, passed=None))
        sums = [np.sqrt(sum(each)) for each in squares.values()]
        self.ratios = [ours / stock for stock, ours in sums]

    def _step(self, schedule, items):
        return align.run_step(schedule, [self._model], items, optimize=False)


def _between(one, other):
    return float((one.logprobs - other.logprobs).abs().max())


@pytest.mark.parametrize(("advantages", "limit", "recipe"), [
    (_zero_sum, policy.ERROR_RATIO, BLOCKWISE), (_of_one_sign, policy.FP8_RATIO, MX),
], ids=["zero sum, blockwise", "of one sign, mxfp8"])  # fmt: skip
def test_errors_are_within_the_policy(advantages, limit, recipe, monkeypatch):
    with one_rank():
        change_rank(monkeypatch, whole=recipe.least, rows=recipe.least)
        ran = Ran(advantages, limit, recipe)
    stock, ours, exact = ran.traces
    assert _between(stock, ours) < 1e-12 and _between(stock, exact) > 1e-3  # rows are the same
    assert ran.verdict.failures == () and ran.verdict.tolerance == limit
    assert max(ran.ratios) <= limit
    report = ran.ours.report
    assert report.forest.executed_tokens < 0.6 * report.forest.raw_tokens
    assert all(not one.padded_length % recipe.least for one in report.forest.segments)


def test_rows_that_are_not_whole_are_noticed(monkeypatch):
    """As transformer-engine asserts them: of segments, and of what their last layer reads."""
    least = BLOCKWISE.least
    for field in ("whole", "rows"):
        with one_rank(), monkeypatch.context() as inside:
            change_rank(inside, **{"whole": least, "rows": least, field: 1})
            model = small_model()
            ours = PrefixSchedule(PrefixConfig(mode="on", min_gain=0, kernel="math"))
            with emulated(unwrap(model)), pytest.raises(ValueError, match="rows, bias None"):
                align.run_step(ours, [model], _items(_zero_sum, 0), optimize=False)


def test_blocks_are_rounded_apart():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(40, 256, generator=draw, dtype=torch.float64)
    x[20] *= 1 << 12  # scales are powers of two, which change only what they make too small
    whole = rounded(x, 1, BLOCKWISE.block)
    assert 1e-3 < float((whole - x)[:20].abs().max()) < 0.5
    assert torch.equal(whole[7:9], rounded(x[7:9], 1, BLOCKWISE.block))
    assert not torch.equal(rounded(x, 128, 1)[:8], rounded(x[:8], 128, 1))
    assert math.isclose(policy.FP8_RATIO**2, 2)
