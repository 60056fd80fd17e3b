"""The log-sum-exp merge against one softmax over all keys, and its corner cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.layers.blocks import merge as merging
from megatron_prefix.layers.blocks.interface import Partial, Runs
from megatron_prefix.layers.blocks.kernels import KERNELS
from megatron_prefix.layers.blocks.merge import Merged, formula, merge, prepare, with_sink

HEADS, DIM, ROWS = 4, 8, 11
MATH = KERNELS["math"]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def random_rows(num: int, heads: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, heads, DIM, generator=generator, dtype=torch.float64).to(dtype)


def random_part(seed: int, dtype: torch.dtype = torch.float64, rows: int = ROWS) -> Partial:
    out = random_rows(rows, HEADS, dtype, seed)
    lse = random_rows(rows, HEADS, torch.float64, seed + 1000).sum(-1).T.contiguous()
    return Partial(out, lse if dtype is torch.float64 else lse.float())


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One softmax over all keys."""
    weights = (q.transpose(0, 1) @ k.permute(1, 2, 0)).softmax(-1)
    return (weights @ v.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(5, 9), (1, 1), (3, 20, 7, 1), (2,) * 9], ids=str)
def test_merged_blocks_are_one_softmax(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (random_rows(n, HEADS, dtype, i) for i, n in enumerate((ROWS, *(2 * [sum(sizes)]))))
    blocks = zip(k.split(sizes), v.split(sizes), strict=True)
    out, lse = merge(
        [MATH.forward(q, *block, Runs.dense(ROWS, len(block[0])), 1.0) for block in blocks]
    )
    whole = MATH.forward(q.double(), k.double(), v.double(), Runs.dense(ROWS, len(k)), 1.0)
    assert out.dtype == dtype and out.is_contiguous()
    assert_close(out, softmax_attention(q.double(), k.double(), v.double()), sum(sizes), dtype)
    assert_close(lse, whole.lse, sum(sizes))


def test_a_single_part_is_returned_as_it_is() -> None:
    part = random_part(0)
    out, lse = merge([part])
    assert out is part.out and lse is part.lse


def test_16_bit_parts_are_rounded_once() -> None:
    parts = [random_part(i, torch.bfloat16) for i in range(7)]
    out, lse = merge(parts)
    wide, wide_lse = merge([Partial(part.out.float(), part.lse) for part in parts])
    assert torch.equal(out, wide.to(torch.bfloat16)) and torch.equal(lse, wide_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
def test_a_block_without_keys_counts_for_exactly_nothing(
    dtype: torch.dtype, garbage: float
) -> None:
    part = random_part(0, dtype)
    dead = Partial(torch.full_like(part.out, garbage), torch.full_like(part.lse, -float("inf")))
    for parts in ([part, dead], [dead, part], [dead, part, dead]):
        out, lse = merge(parts)
        assert torch.equal(out, part.out) and torch.equal(lse, part.lse)


def test_rows_without_any_key_are_zero() -> None:
    part = random_part(0)
    part.lse[:, 3] = -float("inf")
    part.out[3] = float("nan")
    out, lse = merge([part, part])
    assert torch.equal(out[3], torch.zeros(HEADS, DIM)) and torch.isneginf(lse[:, 3]).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[:, 4:]).all()


def test_a_nan_that_counts_is_not_hidden() -> None:
    good, bad = random_part(0), random_part(1)
    bad.out[2, 0, 0] = bad.lse[1, 5] = float("nan")
    out, lse = merge([good, bad])
    assert torch.isnan(out[2, 0, 0]) and torch.isnan(out[5, 1]).all() and torch.isnan(lse[1, 5])
    assert int(torch.isnan(out).sum()) == 1 + DIM


def test_large_scores_neither_overflow_nor_vanish() -> None:
    # Multiples of 1/64 stay exact in fp32 when 8192 is added, so nothing at all may change.
    parts = [random_part(i, torch.float32) for i in range(3)]
    parts = [Partial(part.out, (part.lse * 64).round() / 64) for part in parts]
    out, _ = merge(parts)
    for shift in (8192.0, -8192.0):
        far, far_lse = merge([Partial(part.out, part.lse + shift) for part in parts])
        assert torch.equal(far, out) and torch.isfinite(far_lse).all()
    dominated, _ = merge([parts[0], Partial(parts[1].out, parts[1].lse - 8192.0)])
    assert torch.equal(dominated, parts[0].out)


def test_misuse_is_a_value_error() -> None:
    part = random_part(0)
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])
    with pytest.raises(ValueError, match="different shapes"):
        merge([part, random_part(1, rows=ROWS + 1)])


def test_any_number_of_parts_is_merged_in_few_kinds_of_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counted(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype) -> Merged:
        calls.append((len(outs), outs[0].dtype, dtype))
        return formula(outs, lses, dtype)

    monkeypatch.setattr(merging, "implementation", lambda _: counted)
    for num in (2, 9, 4, 8, 3, 5, 12, 6, 7):
        parts = [random_part(i, torch.bfloat16) for i in range(num)]
        out, lse = merge(parts)
        outs, lses = [part.out.double() for part in parts], [part.lse for part in parts]
        wanted, wanted_lse = formula(outs, lses, torch.float64)
        assert_close(out, wanted, num, torch.bfloat16)
        assert_close(lse, wanted_lse, num)
    assert len(set(calls)) == 6


def test_every_kind_of_call_is_made_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `merge` calls for any number of parts has been compiled by `prepare`."""
    calls: set[tuple[object, ...]] = set()

    def noted(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype) -> Merged:
        calls.add((*(out.dtype for out in outs), lses[0].dtype, dtype))
        return formula(outs, lses, dtype)

    monkeypatch.setattr(merging, "implementation", lambda _: noted)
    for dtype, kinds in ((torch.bfloat16, 6), (torch.float32, 2), (torch.float64, 2)):
        calls.clear()
        prepare(torch.device("cpu"), dtype, HEADS, DIM)
        before = set(calls)
        assert len(before) == kinds
        for num in range(2, 12):
            merge([random_part(i, dtype) for i in range(num)])
        assert calls == before


def test_nothing_is_compiled_on_the_cpu() -> None:
    assert merging.implementation("cpu") is formula


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("place", range(3))
def test_the_largest_block_may_stand_anywhere(place: int, dtype: torch.dtype) -> None:
    """exp of its distance to any other overflows."""
    parts = [random_part(i, dtype) for i in range(3)]
    parts[place] = Partial(parts[place].out, parts[place].lse + 8192.0)
    out, lse = merge(parts)
    assert torch.equal(out, parts[place].out) and torch.equal(lse, parts[place].lse)


def test_a_sink_beside_large_scores_costs_no_accuracy() -> None:
    """Against fp64: the merged log-sum-exp is rounded by more than the share may be off."""
    draw = torch.Generator().manual_seed(0)
    lse = 250 + torch.randn(HEADS, 100, generator=draw)
    sink = 250 + torch.randn(HEADS, generator=draw)
    out, total = with_sink(torch.ones(100, HEADS, DIM), lse, sink)
    share = 1 / (1 + torch.exp(sink.double()[:, None] - lse.double()))
    assert_close(out, share.T[..., None].expand(out.shape), 2)
    assert_close(total, torch.logaddexp(lse.double(), sink.double()[:, None]), 2)
