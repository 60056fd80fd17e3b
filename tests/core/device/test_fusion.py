"""Whether Triton is used, and the sums that it computes, as torch computes them on the CPU."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_prefix.device.fusion import has_triton
from megatron_prefix.features.context_parallel import places
from megatron_prefix.features.context_parallel.own_keys import key_sums
from megatron_prefix.tree import cp_layout

PROBE = "megatron_prefix.device.triton_probe"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No answer is remembered, and new tensors are on the CPU."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *sizes, **_: ones(*sizes))
    has_triton.cache_clear()
    yield
    has_triton.cache_clear()


def probing(monkeypatch: pytest.MonkeyPatch, doubled: Any) -> None:
    monkeypatch.setitem(sys.modules, PROBE, SimpleNamespace(doubled=doubled))


def raises(error: Exception) -> Any:
    def doubled(_: torch.Tensor) -> None:
        raise error

    return doubled


def test_it_is_used_where_its_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    probing(monkeypatch, lambda x: 2 * x)
    assert has_triton("cuda") and not has_triton("cpu")


@pytest.mark.parametrize(
    ("doubled", "why"),
    [
        (None, "ModuleNotFoundError"),
        (raises(RuntimeError("no such device\nmore")), "RuntimeError: no such device"),
        (lambda x: 3 * x, "a wrong result"),
    ],
    ids=["not installed", "no such device", "wrong"],
)
def test_where_it_does_not_work_this_is_said_once(
    doubled: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    probing(monkeypatch, doubled)
    if doubled is None:
        monkeypatch.setitem(sys.modules, PROBE, None)
    with caplog.at_level(logging.WARNING):
        assert not any(has_triton("cuda") for _ in range(3))
    (record,) = caplog.records
    assert why in record.getMessage() and "more" not in record.getMessage()


def test_out_of_memory_is_not_taken_for_a_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    probing(monkeypatch, raises(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        has_triton("cuda")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lengths", [(12,), (12, 24, 12)], ids=str)
def test_places_of_own_keys_say_the_same_both_ways(lengths: tuple[int, ...], size: int) -> None:
    """Sums over the places that keys have, and over the keys that places have."""
    num = sum(lengths)
    for rank in range(size):
        runs = cp_layout.own_runs(lengths, rank, size)
        own = cp_layout.view_order(lengths, size)[runs.visible]
        gradients = torch.randn(len(own), 2, 3), torch.randn(len(own), 2, 5)
        for begin in (None, torch.randn(num, 2, 8)):
            tables = {"own": torch.from_numpy(own)}
            base = None if begin is None else begin.clone()
            got = key_sums(gradients, tables.__getitem__, num, base)
            both = torch.cat([torch.cat(gradients, -1), torch.zeros(1, 2, 8)])
            sources = places.own_sums(lengths, rank, size)
            wanted = both[sources[0]] + both[sources[1]] + (0 if begin is None else begin)
            torch.testing.assert_close(got, wanted)
            found = np.sort(sources[sources >= 0])
            assert np.array_equal(found, np.arange(len(own)))
