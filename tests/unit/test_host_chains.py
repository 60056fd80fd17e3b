"""Chains on the host: what they return, what is on the device, and the order of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.attention.blocks import Block
from megatron_prefix.cache import SidecarCache
from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.offload import chains as module
from megatron_prefix.offload.chains import HostLayers
from megatron_prefix.offload.segment import Offloader
from megatron_prefix.offload.transfers import CudaTransfers, HostTransfers
from tests.harness.sidecar import DIM, HEADS, LAYERS, VALUE_DIM, random, step, tree, visit
from tests.unit.test_transfers import DEVICE, streams

__all__ = ["streams"]  # a fixture

SEGMENTS = tree()


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chain has a border of pieces in it."""
    monkeypatch.setattr(module, "PIECE_ROWS", 4)


def hosted(transfers: Any, num_host: int) -> tuple[SidecarCache, Offloader]:
    offloader = Offloader(transfers)
    offloader.begin_step()
    host = HostLayers(offloader, LAYERS, num_host)
    return SidecarCache(SEGMENTS, LAYERS, host=host), offloader


@pytest.mark.parametrize("num_host", [1, 2, 3, 4, 9])
def test_the_same_as_on_the_device(num_host: int) -> None:
    expected = step(SidecarCache(SEGMENTS, LAYERS), SEGMENTS)
    cache, offloader = hosted(HostTransfers(), num_host)
    found = step(cache, SEGMENTS)
    assert len(found) == len(expected) > 100
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert cache.num_bytes == 0
    cache.clear()
    assert offloader.pool.used_bytes == 0


@pytest.mark.parametrize("num_host", [1, 2, 4])
def test_copies_are_waited_for(streams: dict[str, Any], num_host: int) -> None:
    """On streams as late (stores: or as early) as allowed, in several steps with one pool."""
    expected = step(SidecarCache(SEGMENTS, LAYERS), SEGMENTS)
    offloader = Offloader(CudaTransfers(DEVICE))
    for _ in range(3):
        offloader.begin_step()
        cache = SidecarCache(SEGMENTS, LAYERS, host=HostLayers(offloader, LAYERS, num_host))
        found = step(cache, SEGMENTS)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        cache.clear()
        offloader.end_step()
        assert offloader.pool.used_bytes == 0
    assert streams["recorded"] == 0  # memory is held instead, and serves the next layer


@pytest.mark.parametrize("broken", ["_arrive", "_settle"])
def test_these_tests_can_fail(
    streams: dict[str, Any], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step(SidecarCache(SEGMENTS, LAYERS), SEGMENTS)
    if broken == "_arrive":
        monkeypatch.setattr(module.HostChain, "_arrive", lambda self: None)
        empty: Callable[..., Tensor] = Tensor.new_empty
        monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
        cache, _ = hosted(CudaTransfers(DEVICE), 2)
        found = step(cache, SEGMENTS)
        assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    else:
        monkeypatch.setattr(HostLayers, "_settle", lambda self, left: None)
        cache, _ = hosted(CudaTransfers(DEVICE), 2)
        step(cache, SEGMENTS)
        assert len(cache._host._leaving) > module.LEAVING  # type: ignore[union-attr]


@pytest.mark.parametrize("until", ["F1", "B5", "F3", "B4"])
def test_a_failed_step_leaves_nothing_behind(streams: dict[str, Any], until: str) -> None:
    cache, offloader = hosted(CudaTransfers(DEVICE), 2)
    step(cache, SEGMENTS, until)
    cache.prefetch(1, 4, backward=True)  # on its way when the step fails
    cache.clear()
    assert cache.num_bytes == 0 == offloader.pool.used_bytes
    assert not cache._host._leaving  # type: ignore[union-attr]


def test_only_what_a_layer_uses_is_on_the_device() -> None:
    cache, offloader = hosted(HostTransfers(), LAYERS)
    size = torch.float64.itemsize * HEADS * (DIM + VALUE_DIM)
    for layer in range(LAYERS):
        visit(cache, SEGMENTS[0], 0, layer, backward=False)
        assert cache.num_bytes == 0
        cache.prefetch(layer, 1)
        assert cache.num_bytes == (5 + 4) * size  # the first chunk, and room for the second
        cache.release(layer)
    assert offloader.pool.used_bytes >= LAYERS * 12 * size
    visit(cache, SEGMENTS[1], 1, 3, backward=False)
    cache.read(3, Block(0, 9))
    cache.add_gradient(3, Block(0, 9), random(9, DIM, 1), random(9, VALUE_DIM, 1))
    assert cache.num_bytes == 2 * 9 * size
    before = offloader.counts.stored
    cache.release(3)
    assert cache.num_bytes == 0
    assert before == (LAYERS * 5 + 4) * size and offloader.counts.stored == before + 9 * size


def test_layers_are_spread_and_found_in_both_directions() -> None:
    offloader = Offloader(HostTransfers())
    some = HostLayers(offloader, 32, 8)
    assert [layer for layer in range(32) if layer in some] == list(range(3, 32, 4))
    assert [some.near(layer, False) for layer in (0, 3, 4, 31, 32)] == [3, 3, 7, 31, None]
    assert [some.near(layer, True) for layer in (31, 30, 3, 2, -1)] == [31, 27, 3, None, None]
    assert not any(layer in HostLayers(offloader, 4, 0) for layer in range(4))


def test_a_number_of_layers_is_checked() -> None:
    with pytest.raises(UserError, match="cache_host_layers is -1: give a number from 0"):
        PrefixConfig(cache_host_layers=-1)
