"""The order that the CUDA transfers ask of their streams, on streams as late or early as allowed.

What is issued to a side stream happens only when somebody waits for it, or for stores at once.  A
missing wait then shows: memory is read before it was written (it is NaN), or overwritten before it
was read.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.device.memory import free_bytes
from megatron_prefix.features.host import pool as pools
from megatron_prefix.features.host import transfers as module
from megatron_prefix.features.host.segment import Offloader, addresses
from tests.core.features.host.test_offload import expected_gradient, layers

DEVICE = torch.device("cpu")


class Stream:
    """Work that is done only when it is waited for, or at once."""

    def __init__(self, is_early: bool) -> None:
        self.work: list[Callable[[], Any]] = []
        self.done, self.is_early = 0, is_early

    def issue(self, work: Callable[[], Any]) -> None:
        self.work.append(work)
        if self.is_early:
            self.catch_up(len(self.work))

    def catch_up(self, position: int) -> None:
        while self.done < position:
            self.done += 1
            self.work[self.done - 1]()
            self.work[self.done - 1] = lambda: None  # what is done refers to nothing

    def wait_stream(self, other: Stream | None) -> None:
        if other is not None:
            self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.issue(event.happen)

    def record_event(self) -> Event:
        return Event(self, len(self.work))


class Event:
    """A place in a stream's work."""

    def __init__(self, stream: Stream, position: int) -> None:
        self.stream, self.position = stream, position

    def happen(self) -> None:
        self.stream.catch_up(self.position)

    synchronize = happen


class Computing:
    """The stream that computes: what it waits for happens at once."""

    def wait_event(self, event: Event) -> None:
        event.happen()


def cuda_memory(
    monkeypatch: pytest.MonkeyPatch, told: Callable[[], tuple[float, float, float]]
) -> None:
    """Bytes that are free, bytes of the device, and bytes in use, as the driver and torch say."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: told()[:2])
    stats = "active_bytes.all.current"
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {stats: told()[2]})


@pytest.fixture(params=[False, True], ids=["late stores", "early stores"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Lets CudaTransfers run on the CPU with such streams; counts tensors that streams share."""
    # long: a fake of several functions that share a few variables
    seen: dict[str, Any] = {"current": None, "recorded": 0, "streams": 0, "room": 1 << 30}
    copy = Tensor.copy_

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        seen["current"] = stream
        yield
        seen["current"] = None

    def late_copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        stream = seen["current"]
        if stream is None:
            return copy(target, source)
        assert non_blocking
        stream.issue(lambda: copy(target, source))
        return target

    def record(tensor: Tensor, stream: Stream) -> None:
        assert stream is seen["current"]
        seen["recorded"] += 1

    class Side(Stream):
        def __init__(self, device: torch.device) -> None:
            super().__init__(request.param and not seen["streams"])
            seen["streams"] += 1

        def wait_stream(self, other: Any) -> None:
            if not isinstance(other, Computing):
                super().wait_stream(other)

    computing = Computing()
    monkeypatch.setattr(torch.cuda, "Stream", Side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(Tensor, "copy_", late_copy)
    monkeypatch.setattr(Tensor, "record_stream", record)
    monkeypatch.setattr(module.CudaTransfers, "pinned", False)
    monkeypatch.setattr(module.CudaTransfers, "least_bytes", 1)
    monkeypatch.setitem(pools.SLAB_BYTES, False, 1 << 12)
    cuda_memory(monkeypatch, lambda: (seen["room"], 0, 0))
    return seen


@pytest.mark.parametrize("room", [1 << 30, 1])
@pytest.mark.parametrize("early", [True, False])
def test_nothing_is_read_before_it_is_there(
    streams: dict[str, Any], room: int, early: bool
) -> None:
    """Segments one after the other use the same host memory, in this step and the next."""
    streams["room"] = room
    owner = Offloader(module.CudaTransfers(DEVICE))
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


def test_two_segments_under_way_at_once(streams: dict[str, Any]) -> None:
    owner = Offloader(module.CudaTransfers(DEVICE))
    for _ in range(2):
        owner.begin_step()
        inputs = [torch.randn(40, dtype=torch.float64, requires_grad=True) for _ in range(4)]
        segments = [owner.segment(addresses(x)) for x in inputs]
        outputs = [layers(segment, x) for segment, x in zip(segments, inputs, strict=True)]
        for x, y in zip(inputs[::-1], outputs[::-1], strict=True):
            y.sum().backward()
            assert torch.equal(x.grad, expected_gradient(x))


def test_host_memory_given_on_while_its_loads_are_still_to_come(streams: dict[str, Any]) -> None:
    owner = Offloader(module.CudaTransfers(DEVICE))
    for _ in range(3):
        owner.begin_step(1 << 30)
        first, second = (torch.randn(40, dtype=torch.float64, requires_grad=True) for _ in "ab")
        segment = owner.segment(addresses(first))
        y = layers(segment, first)
        segment.prefetch(early=True)
        z = layers(owner.segment(addresses(second)), second)
        for x, output in ((first, y), (second, z)):
            output.sum().backward()
            assert torch.equal(x.grad, expected_gradient(x))


def test_what_is_loaded_lives_until_it_is_waited_for(streams: dict[str, Any]) -> None:
    transfers = module.CudaTransfers(DEVICE)
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


def test_stores_are_waited_for_where_a_limit_is_exceeded(
    monkeypatch: pytest.MonkeyPatch, streams: dict[str, Any]
) -> None:
    used = {"bytes": 0.0}
    cuda_memory(monkeypatch, lambda: (100.0, 0.0, used["bytes"]))
    transfers = module.CudaTransfers(DEVICE, limit=40.0)
    transfers.begin_step(expected=0.0)
    waited: list[float] = []

    def synchronize(event: Event) -> None:
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


def test_a_limit_counts_from_what_is_in_use_when_the_step_begins(
    monkeypatch: pytest.MonkeyPatch, streams: dict[str, Any]
) -> None:
    used = 30.0
    cuda_memory(monkeypatch, lambda: (100.0, 100.0, used))
    free = module.CudaTransfers(DEVICE)
    free.begin_step(expected=25.0)
    used = 35.0
    assert free.room() == 100 - 5 - 35 and free.room(as_planned=True) == 30 + 25 - 35
    used = 30.0
    free.begin_step(expected=90.0)
    assert free.room(as_planned=True) == free.room() == 100 - 5 - 30
    limited = module.CudaTransfers(DEVICE, limit=20.0)
    limited.begin_step(expected=25.0)
    used = 35.0
    assert limited.room() == limited.room(as_planned=True) == 30 + 20 - 35
    assert free_bytes(torch.device("cuda"), None) == 100 - 35 - 5
    assert free_bytes(torch.device("cuda"), 10.0) == 10
