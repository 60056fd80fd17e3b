"""Messages between pipeline stages: one FIFO a neighbour and direction.

Every rank knows the whole plan, so it knows what its neighbour sends and in which order: receives
are posted ahead in that order, and whatever order the actions use them in, each finds its own.

On gloo the host moves the messages: sends and receives are posted as they come.  On NCCL they are
kernels, and trainers set CUDA_DEVICE_MAX_CONNECTIONS=1, with which all streams share one queue to
the device: a kernel that cannot start holds up whatever was issued after it, of any stream.  (Seen
on two H200s: a second receive posted behind a first stopped the step for good.)  So nothing is
issued there that cannot start: each direction has at most one send and one receive in flight, the
next follows when the host has seen that one end; an action is issued when its message is there; and
the host stays at most one action ahead of the device, so that a send does not queue behind later
work.  The device still always has the next action at hand.  The operations of one process group
may run one after the other, so no rank has more than one link, to one neighbour in one direction,
in any process group.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.pipeline.actions import Action, Plan

AHEAD = 2
"""Receives posted before they are needed, on gloo; each holds one message's memory."""
POLL_S = 2e-5
"""Pause between two looks of a waiting host."""

Shape = Callable[[int], tuple[int, ...]]
Queue = collections.deque[Any]


@dataclass(frozen=True)
class Channels:
    """The process groups of a pipeline's messages.

    Attributes:
        ranks: global ranks of the pipeline in order.
        rank: this rank's place among them.
        groups: by direction ("F": to the next rank, "B": to the previous) and the colour of the
            sender, see `colour`.
        timeout: of the pipeline's own process group, and so of these.
    """

    ranks: tuple[int, ...]
    rank: int
    groups: dict[tuple[str, int], Any]
    timeout: timedelta

    @property
    def size(self) -> int:
        """Pipeline size."""
        return len(self.ranks)

    def target(self, kind: str) -> int:
        """Pipeline rank that messages of this direction go to."""
        return (self.rank + (1 if kind == "F" else -1)) % self.size

    def source(self, kind: str) -> int:
        """Pipeline rank that messages of this direction come from."""
        return (self.rank + (-1 if kind == "F" else 1)) % self.size


_made: weakref.WeakKeyDictionary[Any, Channels] = weakref.WeakKeyDictionary()


def colour(sender: int, size: int) -> int:
    """Colours the links of a ring of `size` ranks so that none touches another of its colour.

    With virtual stages the last rank sends to the first, so the links of one direction are a ring:
    two colours for an even one, a third for the closing link of an odd one.
    """
    return 2 if size % 2 and sender == size - 1 else sender % 2


def channels_of(group: Any, device: torch.device) -> Channels:
    """The channels of a pipeline group, made once, with its timeout.

    Every rank of the job calls this together, as making process groups demands.  Each channel is
    used once here, in one order on every rank: NCCL connects at first use, and two ranks must not
    wait for each other's first uses in different orders.
    """
    if group in _made:
        return _made[group]
    ranks, rank = tuple(dist.get_process_group_ranks(group)), group.rank()
    timeout = group._get_backend(device).options._timeout  # torch has no public name for it
    groups: dict[tuple[str, int], Any] = {}
    if len(ranks) > 1:
        pipelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pipelines, ranks)
        every = [list(pipeline) for pipeline in sorted(set(pipelines))]
        colours = sorted({colour(sender, len(ranks)) for sender in range(len(ranks))})
        for key in itertools.product("FB", colours):
            groups[key] = dist.new_subgroups_by_enumeration(every, timeout=timeout)[0]
    made = Channels(ranks, rank, groups, timeout)
    for kind, sender in itertools.product("FB" if groups else "", range(len(ranks))):
        _first_use(made, kind, sender, device)
    _made[group] = made
    return made


@contextlib.contextmanager
def closing_on_failure(group: Any) -> Iterator[None]:
    """Gives the channels up when a step fails: messages of that step may still be in them."""
    try:
        yield
    except BaseException:
        _made.pop(group, None)
        raise


def _first_use(channels: Channels, kind: str, sender: int, device: torch.device) -> None:
    receiver = (sender + (1 if kind == "F" else -1)) % channels.size
    group = channels.groups[kind, colour(sender, channels.size)]
    token = torch.zeros(1, device=device)
    if channels.rank == sender:
        dist.send(token, channels.ranks[receiver], group=group)
    elif channels.rank == receiver:
        dist.recv(token, channels.ranks[sender], group=group)


def messages(plan: Plan, sender: int, kind: str) -> Iterator[Action]:
    """What a rank sends in one direction, in order, as the actions that receive it."""
    size, last = plan.num_ranks, plan.num_stages - 1
    for action in plan.programs[sender]:
        stage = plan.stage(sender, action.chunk)
        if action.kind != kind or stage == (last if kind == "F" else 0):
            continue
        next_stage = stage + (1 if kind == "F" else -1)
        yield Action(kind, action.segment, next_stage // size)


class Links:
    """One rank's messages during one step.

    Args:
        channels: the pipeline's channels.
        plan: the step's plan.
        shape: of a segment's message.
        dtype: of all messages.
        device: where they arrive.
        backward: whether gradients travel too (not with forward_only).
    """

    def __init__(
        self,
        channels: Channels,
        plan: Plan,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        backward: bool,
    ) -> None:
        self._channels, self._shape, self._dtype, self._device = channels, shape, dtype, device
        self._gated = device.type == "cuda"
        kinds = (("F", "B") if backward else ("F",)) if channels.size > 1 else ()
        self._expected = {
            kind: collections.deque(messages(plan, channels.source(kind), kind)) for kind in kinds
        }
        self._outbox: dict[str, Queue] = {kind: collections.deque() for kind in kinds}
        self._sent: dict[str, Queue] = {kind: collections.deque() for kind in kinds}
        self._posted: dict[str, Queue] = {kind: collections.deque() for kind in kinds}
        self._arrived: dict[Action, Tensor] = {}
        self._ends: collections.deque[Any] = collections.deque()
        self._progress()

    def send(self, action: Action, tensor: Tensor) -> None:
        """Sends what `action` made to the stage that waits for it; returns at once."""
        self._outbox[action.kind].append(tensor.detach().contiguous())
        self._progress()

    def receive(self, action: Action) -> Tensor:
        """What `action` needs from its neighbour; the host waits until it is there.

        Raises:
            RuntimeError: the neighbour is gone or silent for the process group's timeout.
        """
        source = self._channels.source(action.kind)
        doing = f"waiting for {action} of pipeline rank {source}"
        patience = _Patience(doing, self._channels.timeout)
        while action not in self._arrived:
            self._progress()
            if action in self._arrived:
                break
            if self._gated:
                patience.wait()
            else:
                self._take(action.kind, doing)
        return self._arrived.pop(action)

    def pace(self) -> None:
        """Called after every action: keeps the host at most one action ahead of the device."""
        if not (self._gated and self._outbox):
            return
        end = torch.cuda.Event()
        end.record()
        self._ends.append(end)
        patience = _Patience("waiting for the device", self._channels.timeout)
        while len(self._ends) > 2 or (self._ends and self._ends[0].query()):
            if self._ends[0].query():
                self._ends.popleft()
                continue
            self._progress()
            patience.wait()

    def finish(self) -> None:
        """Waits until everything sent has left."""
        patience = _Patience("sending the last messages of the step", self._channels.timeout)
        while any(self._outbox.values()):
            self._progress()
            patience.wait()
        for kind, queue in self._sent.items():
            while queue:
                self._wait(queue.popleft()[0], f"sending the last {kind} messages of the step")

    def _progress(self) -> None:
        """Issues every send and receive that may be issued now."""
        for kind in self._outbox:
            sent, posted = self._sent[kind], self._posted[kind]
            while self._gated and sent and sent[0][0].is_completed():
                sent.popleft()
            while self._outbox[kind] and not (self._gated and sent):
                self._issue_send(kind, self._outbox[kind].popleft())
            while self._gated and posted and posted[0][0].is_completed():
                self._take(kind, f"receiving {posted[0][1]}")
            while self._expected[kind] and len(posted) < (1 if self._gated else AHEAD):
                self._issue_receive(kind, self._expected[kind].popleft())

    def _issue_send(self, kind: str, tensor: Tensor) -> None:
        target = self._channels.ranks[self._channels.target(kind)]
        group = self._channels.groups[kind, colour(self._channels.rank, self._channels.size)]
        self._sent[kind].append((dist.isend(tensor, target, group=group), tensor))

    def _issue_receive(self, kind: str, action: Action) -> None:
        source = self._channels.source(kind)
        tensor = torch.empty(self._shape(action.segment), dtype=self._dtype, device=self._device)
        group = self._channels.groups[kind, colour(source, self._channels.size)]
        work = dist.irecv(tensor, self._channels.ranks[source], group=group)
        self._posted[kind].append((work, action, tensor))

    def _take(self, kind: str, doing: str) -> None:
        """Waits for the receive posted first; on CUDA it has ended and the stream learns of it."""
        if not self._posted[kind]:
            raise RuntimeError(f"{doing}: the plan has no such message")
        work, action, tensor = self._posted[kind].popleft()
        self._wait(work, doing)
        self._arrived[action] = tensor

    def _wait(self, work: Any, doing: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"pipeline rank {self._channels.rank}, {doing}: {error}. A neighbour has failed, or"
                f" was silent for {self._channels.timeout}; its own log says why"
            ) from error


class _Patience:
    """Short sleeps of a waiting host, until the process group's timeout."""

    def __init__(self, doing: str, timeout: timedelta) -> None:
        self._doing, self._timeout = doing, timeout
        self._until = time.monotonic() + timeout.total_seconds()

    def wait(self) -> None:
        if time.monotonic() > self._until:
            raise RuntimeError(
                f"{self._doing}: nothing for {self._timeout}; a neighbour has failed or hangs, its"
                " own log says why"
            )
        time.sleep(POLL_S)
