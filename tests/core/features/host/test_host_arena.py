"""Arenas on the host: what they return, what is on the device, and the order of copies."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.features.host import arena as module
from megatron_prefix.features.host.arena import HostLayers
from megatron_prefix.features.host.segment import Offloader
from megatron_prefix.features.host.transfers import CudaTransfers, Transfers
from megatron_prefix.sidecar.cache import SidecarCache
from tests.core.features.host.test_transfers import DEVICE, streams
from tests.harness.sidecar import (
    DIM,
    HEADS,
    LAYERS,
    STEPS,
    VALUE_DIM,
    Step,
    forms,
    random,
    step,
    visit,
)

__all__ = ["streams"]  # a fixture

TREE = STEPS["a tree"]()
any_step = pytest.mark.parametrize("made", [make() for make in STEPS.values()], ids=[*STEPS])
any_layers = pytest.mark.parametrize(
    "recurrent", [(), (0, 2, 3), (0, 1, 2, 3)], ids=["attention", "hybrid", "recurrent"]
)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every segment has a border of pieces in it."""
    monkeypatch.setattr(module, "PIECE_BYTES", 256)


def hosted(
    transfers: Any, num_host: int, made: Step = TREE, recurrent: tuple[int, ...] = ()
) -> tuple[SidecarCache, Offloader]:
    offloader = Offloader(transfers)
    offloader.begin_step()
    host = HostLayers(offloader, LAYERS, num_host)
    return SidecarCache(made.planned(), forms(LAYERS, recurrent), host), offloader


@any_step
@any_layers
@pytest.mark.parametrize("num_host", [1, 2, 3, 4, 9])
def test_the_same_as_on_the_device(num_host: int, recurrent: tuple[int, ...], made: Step) -> None:
    expected = step(SidecarCache(made.planned(), forms(LAYERS, recurrent)), made)
    cache, offloader = hosted(Transfers(), num_host, made, recurrent)
    found = step(cache, made)
    assert len(found) == len(expected) > 60
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert cache.device_bytes.held == 0
    cache.clear()
    assert offloader.pool.used_bytes == 0


@any_step
@any_layers
@pytest.mark.parametrize("num_host", [1, 2, 4])
def test_copies_are_waited_for(
    streams: dict[str, Any], num_host: int, recurrent: tuple[int, ...], made: Step
) -> None:
    """On streams as late (stores: or as early) as allowed, in several steps with one pool."""
    expected = step(SidecarCache(made.planned(), forms(LAYERS, recurrent)), made)
    offloader = Offloader(CudaTransfers(DEVICE))
    for _ in range(3):
        offloader.begin_step()
        host = HostLayers(offloader, LAYERS, num_host)
        cache = SidecarCache(made.planned(), forms(LAYERS, recurrent), host)
        found = step(cache, made)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        cache.clear()
        offloader.end_step()
        assert offloader.pool.used_bytes == 0
    assert streams["recorded"] == 0  # memory is held instead, and serves the next layer


class Watching(Transfers):
    """Knows what is on its way, and that its memory on the device is there until it arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: dict[int, tuple[str, list[StorageWeakRef]]] = {}
        self.most: collections.Counter[str] = collections.Counter()
        self._marks = itertools.count()

    def store(self, pairs: Any, *, held: bool = False) -> Any:
        assert held
        super().store(pairs)
        return self._begin("store", pairs)

    def fill(self, pairs: Any, stored: Any) -> Any:
        super().fill(pairs, None)
        return self._begin("fill", pairs)

    def wait(self, mark: Any) -> None:
        _, memory = self.under_way.pop(mark)
        assert not any(storage.expired() for storage in memory)

    def _begin(self, kind: str, pairs: Any) -> int:
        mark = next(self._marks)
        memory = [StorageWeakRef(device.untyped_storage()) for device, _ in pairs]
        self.under_way[mark] = kind, memory
        self.most |= collections.Counter(kind for kind, _ in self.under_way.values())
        return mark


@any_step
def test_memory_on_its_way_is_held_and_no_more_than_that(made: Step) -> None:
    transfers = Watching()
    cache, _ = hosted(transfers, 2, made)
    step(cache, made)
    cache.clear()
    assert not transfers.under_way
    assert transfers.most["store"] == module.LEAVING + 1  # until the one before is waited for


@any_layers
@pytest.mark.parametrize("until", ["F1", "B5", "F3", "B4"])
def test_a_failed_step_leaves_nothing_behind(
    streams: dict[str, Any], until: str, recurrent: tuple[int, ...]
) -> None:
    cache, offloader = hosted(CudaTransfers(DEVICE), 2, TREE, recurrent)
    step(cache, TREE, until)
    cache.prefetch(1, 4, backward=True)  # on its way when the step fails
    cache.clear()
    assert cache.device_bytes.held == 0 == offloader.pool.used_bytes
    assert not cache._special._leaving  # type: ignore[union-attr]


def test_what_is_loaded_in_vain_is_waited_for() -> None:
    transfers = Watching()
    cache, _ = hosted(transfers, 2)
    step(cache, TREE, "B4")
    cache.prefetch(1, 4, backward=True)
    assert [kind for kind, _ in transfers.under_way.values()].count("fill") > 1
    cache.clear()
    assert not transfers.under_way


def test_only_what_a_layer_uses_is_on_the_device() -> None:
    """The whole arena of a layer, during its visit; copies of the segments that need one."""
    cache, offloader = hosted(Transfers(), LAYERS)
    row = torch.float64.itemsize * HEADS * (DIM + VALUE_DIM)
    arena = cache.map.positions.length * row
    assert (
        cache.map.positions.length == 5 + 4 + 6 + 2
    )  # the third chunk lies where the branch will be
    for layer in range(LAYERS):
        visit(cache, TREE.segments[0], 0, layer, backward=False)
        assert cache.device_bytes.held == 0
        cache.prefetch(layer, 1)
        assert cache.device_bytes.held == arena
        cache.release(layer)
    assert offloader.pool.used_bytes >= LAYERS * arena
    for index in (1, 2):
        visit(cache, TREE.segments[index], index, 3, backward=False)
    key, _ = cache.read(3, 5, cache.level(5, 0))
    assert len(key) == 5 + 4 + 3
    cache.add(3, 5, cache.level(5, 0), (random(12, DIM, 1), random(12, VALUE_DIM, 1)))
    assert cache.device_bytes.held == 2 * arena
    before = offloader.counts.stored
    cache.release(3)
    assert cache.device_bytes.held == 0
    assert before == (LAYERS * 5 + 4 + 3) * row and offloader.counts.stored == before + 12 * row


class Counting(Transfers):
    """Counts the rows of K that are loaded, in one list a call."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[int] = []

    def fill(self, pairs: Any, stored: Any) -> Any:
        widths = (DIM, VALUE_DIM)
        self.loaded.append(sum(device[..., 0].shape[0] for device, _ in pairs) // len(widths))
        return super().fill(pairs, stored)


def test_only_visible_rows_are_loaded_neighbours_in_one_copy() -> None:
    made, transfers = STEPS["packed trees"](), Counting()
    cache, _ = hosted(transfers, LAYERS, made)
    for index in (0, 1, 2):
        visit(cache, made.segments[index], index, 0, backward=False)
    transfers.loaded.clear()
    visit(cache, made.segments[4], 4, 0, backward=False)
    assert transfers.loaded == [9 + 9]  # segments 0 and 1 lie side by side; 2 is not seen


def test_layers_are_spread_and_found_in_both_directions() -> None:
    offloader = Offloader(Transfers())
    some = HostLayers(offloader, 32, 8)
    assert [layer for layer in range(32) if layer in some] == list(range(3, 32, 4))
    assert [some.near(layer, False) for layer in (0, 3, 4, 31, 32)] == [3, 3, 7, 31, None]
    assert [some.near(layer, True) for layer in (31, 30, 3, 2, -1)] == [31, 27, 3, None, None]
    assert not any(layer in HostLayers(offloader, 4, 0) for layer in range(4))


def test_a_number_of_layers_is_checked() -> None:
    with pytest.raises(UserError, match="cache_host_layers is -1: give a number from 0"):
        PrefixConfig(cache_host_layers=-1)
