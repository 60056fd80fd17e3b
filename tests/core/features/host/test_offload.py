"""Saved tensors on their way to the host and back, on plain host memory."""

import gc

import pytest
import torch

from megatron_prefix.features.host import pool as pools
from megatron_prefix.features.host.pool import StagingPool
from megatron_prefix.features.host.segment import Offloader, SavedStorage, StorageState, addresses
from megatron_prefix.features.host.transfers import Transfers

ROOM = 1 << 30


class Recorded(Transfers):
    """Copies that are counted, by the address of the host's side."""

    def __init__(self, limit=ROOM):
        super().__init__(limit)
        self.stored = []
        self.num_loaded = 0
        self.asked = []

    def store(self, pairs):
        self.stored += [host for _, host in pairs]
        super().store(pairs)

    def load(self, host, stored):
        self.num_loaded += 1
        return super().load(host, stored)

    def room(self, *, as_planned=False):
        self.asked.append(as_planned)
        return super().room(as_planned=as_planned)


@pytest.fixture
def transfers():
    return Recorded()


def segment_of(transfers, *resident):
    owner = Offloader(transfers)
    return owner, owner.segment(addresses(*resident))


def layers(segment, x, num=4):
    """Layers that save their input and, as two views, a product of their own."""
    with segment.saving():
        for _ in range(num):
            both = torch.cat([x.sin(), x.cos()])
            first, second = both.chunk(2)
            x = first * second + x
            segment.layer_done()
    return x


def entries():
    """All that something still refers to."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is SavedStorage]


def expected_gradient(x):
    twin = x.detach().clone().requires_grad_()
    y = twin
    for _ in range(4):
        y = y.sin() * y.cos() + y
    y.sum().backward()
    assert twin.grad is not None
    return twin.grad


def test_the_same_gradient_and_nothing_held(transfers):
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


def test_a_segment_that_is_dropped_gives_its_memory_back(transfers):
    x = torch.randn(5, requires_grad=True)
    owner, segment = segment_of(transfers)
    y = layers(segment, x)
    assert owner.pool.used_bytes > 0
    del y
    assert owner.pool.used_bytes == 0


def test_layers_are_loaded_ahead_of_their_backward(transfers):
    x = torch.randn(5, requires_grad=True)
    owner, segment = segment_of(transfers)
    y = layers(segment, x)
    segment.prefetch()
    at = [{entry.state for entry in entries() if entry.layer == layer} for layer in range(4)]
    assert at[3] == at[2] == {StorageState.LOADED} and at[0] == {StorageState.OFFLOADED}
    y.sum().backward()
    assert owner.counts.on_demand == 0


@pytest.mark.parametrize("early", [False, True])
def test_without_room_prefetch_waits_and_tensors_come_on_demand(transfers, early):
    x = torch.randn(5, requires_grad=True)
    owner, segment = segment_of(transfers)
    y = layers(segment, x)
    transfers.limit = 1
    segment.prefetch(early=early)
    assert owner.counts.prefetched == 0 and owner.counts.num_delayed == 1
    y.sum().backward()
    assert torch.equal(x.grad, expected_gradient(x))
    assert owner.counts.on_demand == owner.counts.stored


def test_a_change_in_place_is_an_error(transfers):
    x = torch.randn(5, requires_grad=True)
    _, segment = segment_of(transfers, x)
    with pytest.raises(RuntimeError, match="changed in place after it was saved"), segment.saving():
        x.exp().zero_()


def test_the_pool_never_hands_out_bytes_twice(monkeypatch):
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
