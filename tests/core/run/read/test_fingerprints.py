"""Numbers that stand for rows."""

from __future__ import annotations

import pytest
import torch

from megatron_prefix.features.vision.fingerprints import ROWS, combined, fingerprints


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_equal_rows_have_equal_numbers_and_others_do_not(dtype: torch.dtype) -> None:
    rows = torch.randn(ROWS + 7, 3, 16, generator=torch.Generator().manual_seed(0)) * 100
    rows = rows.to(dtype)
    found = fingerprints(rows)
    assert found.shape == rows.shape[:-1] and found.dtype == torch.int64
    assert torch.equal(found, fingerprints(rows.clone()))
    assert len(found.unique()) == len(rows.flatten(0, 1).unique(dim=0))
    assert torch.equal(found[5:9], fingerprints(rows[5:9]))  # whatever they are looked at with


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fractions_and_signs_count(dtype: torch.dtype) -> None:
    rows = torch.tensor([0.0, -0.0, 0.125, 0.25, -0.125, 1.25]).to(dtype)[:, None]
    assert len(fingerprints(rows).unique()) == len(rows)


def test_one_bit_is_enough() -> None:
    row = torch.zeros(1, 8, dtype=torch.int64)
    others = torch.cat([torch.eye(8, dtype=torch.int64) << bit for bit in range(63)])
    every = torch.cat([row, others, ~others, -others])
    assert len(fingerprints(every).unique()) == len(every.unique(dim=0))


def test_places_count() -> None:
    row = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [3.0, 2.0, 1.0]])
    assert len(fingerprints(row).unique()) == 3


def test_pairs_count_in_their_order() -> None:
    numbers = torch.cat([torch.arange(-50, 50), torch.tensor([2**62, -(2**62), 2**63 - 1])])
    one, other = torch.cartesian_prod(numbers, numbers).unbind(1)
    assert len(combined(one, other).unique()) == len(numbers) ** 2
