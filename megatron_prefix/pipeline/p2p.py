"""Messages between pipeline stages: one FIFO a neighbour and direction.

Every rank knows the whole plan, so it knows what its neighbour sends and in which order: receives are
posted ahead in that order, and whatever order the actions use them in, each finds its own.  Sends
never wait.  Both directions have process groups of their own: on NCCL two operations of one group run
one after the other, and a receive posted ahead would hold up the sends behind it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.pipeline.actions import Action, Plan

AHEAD = 2
"""Receives posted before they are needed; each holds one message's memory."""

Shape = Callable[[int], tuple[int, ...]]


@dataclass(frozen=True)
class Channels:
    """The process groups of a pipeline's messages.

    Attributes:
        ranks: global ranks of the pipeline in order.
        rank: this rank's place among them.
        groups: by direction ("F": to the next rank, "B": to the previous) and the sender's parity:
            of two ranks with virtual stages each sends to the other in the same direction.
    """

    ranks: tuple[int, ...]
    rank: int
    groups: dict[tuple[str, int], Any]

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


_made: dict[Any, Channels] = {}


def channels_of(group: Any, device: torch.device) -> Channels:
    """The channels of a pipeline group, made once.

    Every rank of the job calls this together, as making process groups demands.  Each channel is
    used once here, in one order on every rank: NCCL connects at first use, and two ranks must not
    wait for each other's first uses in different orders.
    """
    if group in _made:
        return _made[group]
    ranks, rank = tuple(dist.get_process_group_ranks(group)), group.rank()
    groups: dict[tuple[str, int], Any] = {}
    if len(ranks) > 1:
        pipelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pipelines, ranks)
        every = [list(pipeline) for pipeline in sorted(set(pipelines))]
        for key in itertools.product("FB", (0, 1)):
            groups[key] = dist.new_subgroups_by_enumeration(every)[0]
    made = Channels(ranks, rank, groups)
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
    group, token = channels.groups[kind, sender % 2], torch.zeros(1, device=device)
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
        kinds = ("F", "B") if backward else ("F",)
        self._expected = {
            kind: collections.deque(messages(plan, channels.source(kind), kind))
            for kind in (kinds if channels.size > 1 else ())
        }
        self._posted: dict[Action, tuple[Any, Tensor]] = {}
        self._sent: collections.deque[tuple[Any, Tensor]] = collections.deque()
        for kind, expected in self._expected.items():
            self._post(kind, min(AHEAD, len(expected)))

    def send(self, action: Action, tensor: Tensor) -> None:
        """Sends what `action` made to the stage that waits for it; returns at once."""
        kind = action.kind
        tensor = tensor.detach().contiguous()
        work = dist.isend(
            tensor, self._channels.ranks[self._channels.target(kind)],
            group=self._channels.groups[kind, self._channels.rank % 2],
        )  # fmt: skip
        self._sent.append((work, tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(self, action: Action) -> Tensor:
        """What `action` needs from its neighbour; waits for it (on CUDA the stream does).

        Raises:
            RuntimeError: the neighbour is gone or silent for the process group's timeout.
        """
        while action not in self._posted:
            self._post(action.kind, 1)
        work, tensor = self._posted.pop(action)
        self._wait(work, f"waiting for {action} of pipeline rank {self._channels.source(action.kind)}")
        self._post(action.kind, min(1, len(self._expected[action.kind])))
        return tensor

    def finish(self) -> None:
        """Waits until everything sent has left."""
        while self._sent:
            work, _ = self._sent.popleft()
            self._wait(work, "sending the last messages of the step")

    def _post(self, kind: str, num: int) -> None:
        source = self._channels.source(kind)
        for _ in range(num):
            if not self._expected[kind]:
                raise RuntimeError(f"pipeline rank {source} sends no more {kind} messages in this plan")
            action = self._expected[kind].popleft()
            tensor = torch.empty(self._shape(action.segment), dtype=self._dtype, device=self._device)
            group = self._channels.groups[kind, source % 2]
            work = dist.irecv(tensor, self._channels.ranks[source], group=group)
            self._posted[action] = (work, tensor)

    def _wait(self, work: Any, doing: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"pipeline rank {self._channels.rank}, {doing}: {error}. A neighbour has failed or"
                " hangs; its own log says why"
            ) from error
