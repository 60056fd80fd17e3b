"""Saved tensors on their way to the host and back, on plain host memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.features.host import pool as pools
from megatron_prefix.features.host.pool import StagingPool
from megatron_prefix.features.host.segment import (
    OffloadedSegment,
    Offloader,
    SavedStorage,
    StorageState,
    addresses,
)
from megatron_prefix.features.host.transfers import Transfers

ROOM = 1 << 30


class Recorded(Transfers):
    """Copies that are counted, by the address of the host's side."""

    def __init__(self, limit: float = ROOM) -> None:
        super().__init__(limit)
        self.stored: list[Tensor] = []
        self.num_loaded = 0
        self.asked: list[bool] = []

    def store(self, pairs: Any) -> None:
        self.stored += [host for _, host in pairs]
        super().store(pairs)

    def load(self, host: Tensor, stored: None) -> tuple[Tensor, None]:
        self.num_loaded += 1
        return super().load(host, stored)

    def room(self, *, as_planned: bool = False) -> float:
        self.asked.append(as_planned)
        return super().room(as_planned=as_planned)


@pytest.fixture
def transfers() -> Iterator[Recorded]:
    return Recorded()


def segment_of(transfers: Recorded, *resident: Tensor) -> tuple[Offloader, OffloadedSegment]:
    owner = Offloader(transfers)
    return owner, owner.segment(addresses(*resident))


def layers(segment: OffloadedSegment, x: Tensor, num: int = 4) -> Tensor:
    """Layers that save their input and, as two views, a product of their own."""
    with segment.saving():
        for _ in range(num):
            both = torch.cat([x.sin(), x.cos()])
            first, second = both.chunk(2)
            x = first * second + x
            segment.layer_done()
    return x


def entries() -> list[SavedStorage]:
    """All that something still refers to."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is SavedStorage]


def expected_gradient(x: Tensor) -> Tensor:
    twin = x.detach().clone().requires_grad_()
    y = twin
    for _ in range(4):
        y = y.sin() * y.cos() + y
    y.sum().backward()
    assert twin.grad is not None
    return twin.grad


def test_the_same_gradient_and_nothing_held(transfers: Recorded) -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    owner, segment = segment_of(transfers, x)
    y = layers(segment, x)
    # Per layer its input (of the first layer: resident) and the storage of both views, once.
    assert len(transfers.stored) == 4 + 3
    assert owner.counts.stored == (4 * 2 + 3) * x.nbytes
    assert owner.pool.used_bytes >= owner.counts.stored
    assert transfers.num_loaded == 0
    y.sum().backward()
    assert torch.equal(x.grad, expected_gradient(x))
    assert transfers.num_loaded == len(transfers.stored)
    assert owner.counts.on_demand + owner.counts.prefetched == owner.counts.stored
    assert owner.pool.used_bytes == 0 and not entries()


def test_a_segment_that_is_dropped_gives_its_memory_back(transfers: Recorded) -> None:
    x = torch.randn(5, requires_grad=True)
    owner, segment = segment_of(transfers)
    y = layers(segment, x)
    assert owner.pool.used_bytes > 0
    del y
    assert owner.pool.used_bytes == 0


def test_layers_are_loaded_ahead_of_their_backward(transfers: Recorded) -> None:
    x = torch.randn(5, requires_grad=True)
    owner, segment = segment_of(transfers)
    y = layers(segment, x)
    segment.prefetch()
    at = [{entry.state for entry in entries() if entry.layer == layer} for layer in range(4)]
    assert at[3] == at[2] == {StorageState.LOADED} and at[0] == {StorageState.OFFLOADED}
    y.sum().backward()
    assert owner.counts.on_demand == 0


def test_early_prefetch_takes_all_that_the_plan_has_room_for(transfers: Recorded) -> None:
    x = torch.randn(5, requires_grad=True)
    owner, segment = segment_of(transfers)
    y = layers(segment, x)
    segment.prefetch(early=True)
    assert owner.counts.prefetched == owner.counts.stored
    assert set(transfers.asked) == {True}
    y.sum().backward()
    assert torch.equal(x.grad, expected_gradient(x))


@pytest.mark.parametrize("early", [False, True])
def test_without_room_prefetch_waits_and_tensors_come_on_demand(
    transfers: Recorded, early: bool
) -> None:
    x = torch.randn(5, requires_grad=True)
    owner, segment = segment_of(transfers)
    y = layers(segment, x)
    transfers.limit = 1
    segment.prefetch(early=early)
    assert owner.counts.prefetched == 0 and owner.counts.num_delayed == 1
    y.sum().backward()
    assert torch.equal(x.grad, expected_gradient(x))
    assert owner.counts.on_demand == owner.counts.stored


def test_room_that_comes_later_is_used(transfers: Recorded) -> None:
    x = torch.randn(5, requires_grad=True)
    owner, segment = segment_of(transfers)
    y = layers(segment, x)
    transfers.limit = 1
    segment.prefetch()
    y.register_hook(lambda gradient: setattr(transfers, "limit", ROOM))
    y.sum().backward()
    assert owner.counts.prefetched > 0 < owner.counts.num_delayed


def test_parameters_and_views_of_them_stay() -> None:
    transfers = Recorded()
    weight = torch.nn.Parameter(torch.randn(4, 4))
    _owner, segment = segment_of(transfers, weight)
    x = torch.randn(4, 4, requires_grad=True)
    with segment.saving():
        y = (x @ weight.t()) @ weight
    kept = {host.shape for host in transfers.stored}
    assert kept == {torch.Size([x.nbytes])} and len(transfers.stored) == 2  # x and its product
    y.sum().backward()
    assert weight.grad is not None


def test_a_tensor_saved_twice_is_stored_once_until_its_last_use() -> None:
    transfers = Recorded()
    _owner, segment = segment_of(transfers)
    x = torch.randn(5, requires_grad=True)
    table = torch.randn(5)
    with segment.saving():
        y = x
        for _ in range(3):
            y = y * table
            segment.layer_done()
    assert len(transfers.stored) == 1
    (y.sum()).backward()
    assert torch.equal(x.grad, table * table * table)
    assert transfers.num_loaded == 1


def test_small_tensors_stay(transfers: Recorded) -> None:
    transfers.least_bytes = 100
    x = torch.randn(5, requires_grad=True)
    owner, segment = segment_of(transfers)
    layers(segment, x).sum().backward()
    assert owner.counts.stored == 0
    assert torch.equal(x.grad, expected_gradient(x))


def test_a_discarded_output_is_left_to_its_owner(transfers: Recorded) -> None:
    """What Megatron's selective recomputation does with a layer norm's output."""
    x = torch.randn(5, requires_grad=True)
    owner, segment = segment_of(transfers, x)
    with segment.saving():
        middle = x.exp()  # saves its output
        y = middle * 2
        saved, size = middle.detach().clone(), middle.untyped_storage().nbytes()
        middle.untyped_storage().resize_(0)

    def refill(gradient: Tensor) -> None:
        middle.untyped_storage().resize_(size)
        middle.untyped_storage().copy_(saved.untyped_storage())

    y.register_hook(refill)
    y.sum().backward()
    assert owner.counts.stored == 0
    assert torch.equal(x.grad, 2 * saved)


def test_asking_for_a_discarded_output_too_early_is_an_error(transfers: Recorded) -> None:
    x = torch.randn(5, requires_grad=True)
    _, segment = segment_of(transfers, x)
    with segment.saving():
        y = x.exp()
        y.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="before it has been filled again"):
        y.backward(torch.ones(5))


def test_a_tensor_saved_again_after_a_change_is_another(transfers: Recorded) -> None:
    x = torch.ones(5, requires_grad=True)
    _, segment = segment_of(transfers, x)
    buffer = torch.full((5,), 2.0)
    with segment.saving():
        first = x * buffer
        segment.layer_done()
        buffer.add_(1.0)
        second = x * buffer
        segment.layer_done()
    assert torch.autograd.grad(first.sum(), x)[0].tolist() == [2.0] * 5
    assert torch.autograd.grad(second.sum(), x)[0].tolist() == [3.0] * 5


def test_a_change_in_place_is_an_error(transfers: Recorded) -> None:
    x = torch.randn(5, requires_grad=True)
    _, segment = segment_of(transfers, x)
    with pytest.raises(RuntimeError, match="changed in place after it was saved"), segment.saving():
        x.exp().zero_()


def test_transitions_are_checked(transfers: Recorded) -> None:
    x = torch.randn(5, requires_grad=True)
    _, segment = segment_of(transfers)
    y = layers(segment, x)
    entry = entries()[0]
    with pytest.raises(RuntimeError, match="is offloaded and cannot become kept"):
        entry.become(StorageState.KEPT)
    segment._load(entry)
    with pytest.raises(RuntimeError, match="has no host memory"):
        segment._load(entry)
    del y


# --- The staging pool -----------------------------------------------------------------------------


def test_the_pool_keeps_the_first_steps_room_for_the_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pools.SLAB_BYTES, False, 4096)
    pool = StagingPool(pinned=False)
    for _ in range(3):
        leases = [pool.take(size) for size in (1000, 5000, 700)]
        assert all(lease.tensor.dtype == torch.uint8 for lease in leases)
        outside, used = pool.outside_bytes, pool.used_bytes
        del leases
        assert pool.used_bytes == 0
        with caplog.at_level(logging.INFO):
            pool.begin_step()
    assert used == 1024 + 5120 + 1024
    assert outside == 0 and pool.num_bytes == 8192  # the largest tensor fits a slab
    assert caplog.text.count("allocated tensor by tensor") == 1


def test_what_is_expected_has_room_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pools.SLAB_BYTES, False, 4096)
    pool = StagingPool(pinned=False)
    pool.begin_step(9000)
    leases = [pool.take(size) for size in (3000, 4000, 2000)]
    assert pool.outside_bytes == 0 and pool.num_bytes == 3 * 4096
    pool.begin_step(90_000)  # what was staged says more than what was expected
    assert pool.num_bytes == 3 * 4096 and len(leases) == 3


def test_the_pool_never_hands_out_bytes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pools.SLAB_BYTES, False, 8192)
    generator = torch.Generator().manual_seed(0)
    pool, held = StagingPool(pinned=False), []
    for turn in range(400):
        if turn == 50:
            pool.begin_step()
        if held and torch.rand((), generator=generator) < 0.5:
            index = int(torch.randint(len(held), (), generator=generator))
            lease, mark = held.pop(index)
            assert bool((lease.tensor == mark).all())
            del lease
        else:
            lease = pool.take(int(torch.randint(1, 3000, (), generator=generator)))
            lease.tensor.fill_(turn % 256)
            held.append((lease, turn % 256))
    assert all(bool((lease.tensor == mark).all()) for lease, mark in held)
    held.clear()
    lease = None
    assert pool.used_bytes == 0
    pool.begin_step()
    whole = [pool.take(8192) for _ in range(pool.num_bytes // 8192)]
    assert len(whole) > 2 and pool.outside_bytes == 0, "holes are joined again"
