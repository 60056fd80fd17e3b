"""Messages between stages on a GPU, where a message is two kernels that wait for each other.

Two facts decide how they may be issued (both seen on two H200s, with a step that stopped for good):

1. Trainers set CUDA_DEVICE_MAX_CONNECTIONS=1, with which all streams share one queue to the device:
   a kernel that cannot start, such as a second receive behind a first, holds up all that follow.
2. Loading a kernel for the first time may wait for every running kernel, and a receive that was
   posted ahead runs until its neighbour sends, which may need the very work that is being loaded.

So no message kernel is issued before both ends are committed.  The sender tells the receiver that
a message is ready when the device has computed it; the receiver posts the receive, answers, and
does nothing but answer others until it has landed; the sender sends on the answer.  The notes
travel over gloo and are heard by threads.  A rank looks at its notes between actions and while it
waits, and stays at most one action ahead of the device, which so always has the next action at
hand.
"""

from __future__ import annotations

import collections
import itertools
import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.pipeline.actions import Action
from megatron_prefix.pipeline.channels import Channels
from megatron_prefix.pipeline.p2p import Links, Queue, messages

POLL_S = 2e-5
"""Pause between two looks of a waiting host."""
_TAGS = {key: tag for tag, key in enumerate(itertools.product(("ready", "go"), "FB"))}


class GatedLinks(Links):
    """One rank's messages during one step, on a GPU; arguments as `Links`."""

    def __init__(self, channels: Channels, plan: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(channels, plan, *args, **kwargs)
        self._outbox: dict[str, Queue] = {kind: collections.deque() for kind in self._kinds}
        self._ends: collections.deque[Any] = collections.deque()
        self._notes = _Notes(channels)
        for kind in self._kinds:
            self._notes.listen("ready", kind, channels.source(kind), len(self._expected[kind]))
            outgoing = sum(1 for _ in messages(plan, channels.rank, kind))
            self._notes.listen("go", kind, channels.target(kind), outgoing)
        self._side = _side_stream(self._device)

    def send(self, action: Action, tensor: Tensor) -> None:
        """Sends what `action` made to the stage that waits for it; returns at once."""
        self._outbox[action.kind].append(_Letter(tensor.detach().contiguous(), self._mark()))
        self._answer()

    def receive(self, action: Action) -> Tensor:
        """What `action` needs from its neighbour; the host waits until it is there.

        Raises:
            RuntimeError: the neighbour is gone or silent for the process group's timeout.
        """
        source = self._channels.source(action.kind)
        patience = self._patience(f"waiting for {action} of pipeline rank {source}")
        while action not in self._arrived:
            self._answer()
            self._accept()
            patience.wait(self._notes)
        return self._arrived.pop(action)

    def pace(self) -> None:
        """Called after every action: keeps the host at most one action ahead of the device."""
        self._ends.append(self._mark())
        patience = self._patience("waiting for the device")
        while len(self._ends) > 2:
            if self._ends[0].query():
                self._ends.popleft()
                continue
            self._answer()
            self._accept()
            patience.wait(self._notes)

    def finish(self) -> None:
        """Waits until everything sent has left."""
        patience = self._patience("sending the last messages of the step")
        while any(self._outbox.values()):
            self._answer()
            patience.wait(self._notes)
        super().finish()
        self._notes.finish()

    def _answer(self) -> None:
        """Announces messages that the device has computed, sends those that were answered."""
        for kind in self._kinds:
            if not self._outbox[kind]:
                continue
            letter = self._outbox[kind][0]
            if not letter.announced and letter.ready.query():
                self._notes.tell("ready", kind, self._channels.target(kind))
                letter.announced = True
            if letter.announced and self._notes.take("go", kind):
                self._outbox[kind].popleft()
                with torch.cuda.stream(self._side):
                    self._issue_send(kind, letter.tensor)
        for sent in self._sent.values():
            while sent and self._landed(sent[0][0]):
                sent.popleft()

    def _accept(self) -> None:
        """Receives every message that a neighbour has announced."""
        for kind in self._kinds:
            while self._expected[kind] and self._notes.take("ready", kind):
                with torch.cuda.stream(self._side):
                    self._issue_receive(kind)
                self._notes.tell("go", kind, self._channels.source(kind))
                patience = self._patience(f"receiving {self._posted[kind][0][1]}")
                while not self._landed(self._posted[kind][0][0]):
                    self._answer()
                    patience.wait(self._notes)
                tensor = self._posted[kind][0][2]
                if tensor.is_cuda:  # made on the side stream, read on this one
                    tensor.record_stream(torch.cuda.current_stream())
                self._take(kind, "taking a message that has landed")

    def _landed(self, work: Any) -> bool:
        return bool(work.is_completed())

    def _mark(self) -> Any:
        """Something whose query() says whether the device has come this far."""
        event = torch.cuda.Event()
        event.record()
        return event

    def _patience(self, doing: str) -> _Patience:
        doing = f"pipeline rank {self._channels.rank}, {doing}"
        return _Patience(doing, self._channels.timeout)


class _Letter:
    """A message on its way out."""

    def __init__(self, tensor: Tensor, ready: Any) -> None:
        self.tensor, self.ready, self.announced = tensor, ready, False


class _Notes:
    """One-word notes between neighbours, over gloo; every listener is a thread that counts."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._heard = {key: queue.SimpleQueue[None]() for key in _TAGS}
        self._told: collections.deque[Any] = collections.deque()
        self.error: BaseException | None = None

    def listen(self, word: str, kind: str, source: int, count: int) -> None:
        """Hears `count` notes from a pipeline rank."""
        arguments = (word, kind, self._channels.ranks[source], count)
        threading.Thread(target=self._hear, args=arguments, daemon=True).start()

    def _hear(self, word: str, kind: str, source: int, count: int) -> None:
        token = torch.zeros(1)
        try:
            for _ in range(count):
                dist.recv(token, source, group=self._channels.control, tag=_TAGS[word, kind])
                self._heard[word, kind].put(None)
        except Exception as error:  # noqa: BLE001  # whatever it is, the waiting rank must say it
            self.error = error

    def tell(self, word: str, kind: str, target: int) -> None:
        """Sends a note; returns at once."""
        token, rank = torch.zeros(1), self._channels.ranks[target]
        tag = _TAGS[word, kind]
        work = dist.isend(token, rank, group=self._channels.control, tag=tag)
        self._told.append((work, token))

    def take(self, word: str, kind: str) -> bool:
        """Whether there is such a note; it is used up."""
        try:
            self._heard[word, kind].get_nowait()
        except queue.Empty:
            return False
        return True

    def finish(self) -> None:
        """Waits until every note has left."""
        while self._told:
            self._told.popleft()[0].wait()


class _Patience:
    """Short sleeps of a waiting host, until the process group's timeout."""

    def __init__(self, doing: str, timeout: timedelta) -> None:
        self._doing, self._timeout = doing, timeout
        self._until = time.monotonic() + timeout.total_seconds()

    def wait(self, notes: _Notes) -> None:
        """Sleeps a little.

        Raises:
            RuntimeError: the neighbour is gone, or the time is up.
        """
        if notes.error is not None or time.monotonic() > self._until:
            reason = notes.error or f"nothing for {self._timeout}"
            raise RuntimeError(
                f"{self._doing}: {reason}. A neighbour has failed or hangs; its own log says why"
            )
        time.sleep(POLL_S)


def _side_stream(device: torch.device) -> Any:
    """A stream with nothing in it, so that a message waits for no computation but its own."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def make_links(channels: Channels, *args: Any, **kwargs: Any) -> Links:
    """The links of a step, of the kind that the channels' device asks for."""
    gated = channels.control is not None
    return (GatedLinks if gated else Links)(channels, *args, **kwargs)
