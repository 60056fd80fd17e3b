"""The order that the CUDA transfers ask of their streams, on streams as late or early as allowed.

What is issued to a side stream happens only when somebody waits for it, or for stores at once.  A
missing wait then shows: memory is read before it was written (it is NaN), or overwritten before it
was read.
"""

import contextlib
import weakref

import pytest
import torch
from torch import Tensor

from megatron_prefix.features.host import arena as host_arena
from megatron_prefix.features.host import pool as pools
from megatron_prefix.features.host.arena import HostLayers
from megatron_prefix.features.host.segment import Offloader, addresses
from megatron_prefix.features.host.transfers import CudaTransfers
from megatron_prefix.sidecar.cache import SidecarCache
from tests.core.features.host.test_offload import expected_gradient, layers
from tests.harness.sidecar import LAYERS, STEPS, forms, step

DEVICE = torch.device("cpu")


class Stream:
    """Work that is done only when it is waited for, or at once."""

    def __init__(self, is_early):
        self.work = []
        self.done, self.is_early = 0, is_early

    def issue(self, work):
        self.work.append(work)
        if self.is_early:
            self.catch_up(len(self.work))

    def catch_up(self, position):
        while self.done < position:
            self.done += 1
            self.work[self.done - 1]()
            self.work[self.done - 1] = lambda: None  # what is done refers to nothing

    def wait_stream(self, other):
        if other is not None:
            self.wait_event(other.record_event())

    def wait_event(self, event):
        self.issue(event.happen)

    def record_event(self):
        return Event(self, len(self.work))


class Event:
    """A place in a stream's work."""

    def __init__(self, stream, position):
        self.stream, self.position = stream, position

    def happen(self):
        self.stream.catch_up(self.position)

    synchronize = happen


class Computing:
    """The stream that computes: what it waits for happens at once."""

    def wait_event(self, event):
        event.happen()


def cuda_memory(monkeypatch, told):
    """Bytes that are free, bytes of the device, and bytes in use, as the driver and torch say."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: told()[:2])
    stats = "active_bytes.all.current"
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {stats: told()[2]})


@pytest.fixture(params=[False, True], ids=["late stores", "early stores"])
def streams(request, monkeypatch):
    """Lets CudaTransfers run on the CPU with such streams; counts tensors that streams share."""
    # long: a fake of several functions that share a few variables
    seen = {"current": None, "recorded": 0, "streams": 0, "room": 1 << 30}
    copy = Tensor.copy_

    @contextlib.contextmanager
    def on(stream):
        seen["current"] = stream
        yield
        seen["current"] = None

    def late_copy(target, source, non_blocking=False):
        stream = seen["current"]
        if stream is None:
            return copy(target, source)
        assert non_blocking
        stream.issue(lambda: copy(target, source))
        return target

    def record(tensor, stream):
        assert stream is seen["current"]
        seen["recorded"] += 1

    class Side(Stream):
        def __init__(self, device):
            super().__init__(request.param and not seen["streams"])
            seen["streams"] += 1

        def wait_stream(self, other):
            if not isinstance(other, Computing):
                super().wait_stream(other)

    computing = Computing()
    monkeypatch.setattr(torch.cuda, "Stream", Side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(Tensor, "copy_", late_copy)
    monkeypatch.setattr(Tensor, "record_stream", record)
    monkeypatch.setattr(CudaTransfers, "pinned", False)
    monkeypatch.setattr(CudaTransfers, "least_bytes", 1)
    monkeypatch.setitem(pools.SLAB_BYTES, False, 1 << 12)
    cuda_memory(monkeypatch, lambda: (seen["room"], 0, 0))
    return seen


@pytest.mark.parametrize("room", [1 << 30, 1])
@pytest.mark.parametrize("early", [True, False])
def test_nothing_is_read_before_it_is_there(streams, room, early):
    """Segments one after the other use the same host memory, in this step and the next."""
    streams["room"] = room
    owner = Offloader(CudaTransfers(DEVICE))
    for _ in range(3):
        owner.begin_step(room)
        for _ in range(3):
            x = torch.randn(40, dtype=torch.float64, requires_grad=True)
            segment = owner.segment(addresses(x))
            y = layers(segment, x)
            segment.prefetch(early=early)
            y.sum().backward()
            assert torch.equal(x.grad, expected_gradient(x))
        assert owner.pool.used_bytes == 0
    assert owner.pool.num_bytes > 0 == owner.pool.outside_bytes
    assert streams["recorded"] == 9 * 7  # every storage, on its way to the host


def test_what_is_loaded_lives_until_it_is_waited_for(streams):
    transfers = CudaTransfers(DEVICE)
    host = torch.ones(4, dtype=torch.uint8)
    stored = transfers.store([(host.clone(), torch.empty_like(host))])
    loaded, mark = transfers.load(host, stored)
    alive = weakref.ref(loaded)
    del loaded
    assert alive() is not None  # the copy into it is still to come
    transfers.wait(mark)
    assert alive() is None
    alive = weakref.ref(transfers.load(host, stored)[0])
    transfers.end_step()  # after a step that failed
    assert alive() is None


def test_stores_are_waited_for_where_a_limit_is_exceeded(monkeypatch, streams):
    used = {"bytes": 0.0}
    cuda_memory(monkeypatch, lambda: (100.0, 0.0, used["bytes"]))
    transfers = CudaTransfers(DEVICE, limit=40.0)
    transfers.begin_step(expected=0.0)
    waited = []

    def synchronize(event):
        event.happen()
        used["bytes"] -= 10
        waited.append(used["bytes"])

    monkeypatch.setattr(Event, "synchronize", synchronize)
    for number in range(8):
        used["bytes"] += 10  # each waits for its copy
        transfers.store([(torch.ones(1), torch.empty(1))])
        transfers.keep_limit()
        assert len(waited) == max(0, number - 3)
    transfers.end_step()
    used["bytes"] = 200.0
    transfers.keep_limit()  # nothing is left to wait for
    assert len(waited) == 4


# Arenas on the host: what they return, what is on the device, and the order of copies -------------

TREE = STEPS["a tree"]()
any_step = pytest.mark.parametrize("made", [make() for make in STEPS.values()], ids=[*STEPS])
any_layers = pytest.mark.parametrize(
    "recurrent", [(), (0, 2, 3), (0, 1, 2, 3)], ids=["attention", "hybrid", "recurrent"]
)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    """Every segment has a border of pieces in it."""
    monkeypatch.setattr(host_arena, "PIECE_BYTES", 256)


def hosted(transfers, num_host, made=TREE, recurrent=()):
    offloader = Offloader(transfers)
    offloader.begin_step()
    host = HostLayers(offloader, LAYERS, num_host)
    return SidecarCache(made.planned(), forms(LAYERS, recurrent), host), offloader


@any_step
@any_layers
@pytest.mark.parametrize("num_host", [2, 4])
def test_copies_are_waited_for(streams, num_host, recurrent, made):
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


@any_layers
@pytest.mark.parametrize("until", ["F1", "B5", "F3", "B4"])
def test_a_failed_step_leaves_nothing_behind(streams, until, recurrent):
    cache, offloader = hosted(CudaTransfers(DEVICE), 2, TREE, recurrent)
    step(cache, TREE, until)
    cache.prefetch(1, 4, backward=True)  # on its way when the step fails
    cache.clear()
    assert cache.device_bytes.held == 0 == offloader.pool.used_bytes
    assert not cache._special._leaving
