"""Messages between pipeline stages: one FIFO a neighbour and direction.

Every rank knows the whole plan, so it knows what its neighbour sends and in which order: receives
follow that order, and whatever order the actions use the messages in, each finds its own.

Here the host moves the messages (gloo): receives are posted ahead and sends never wait.  On a GPU
messages are kernels, which ask for more care: gated.py.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.pipeline.actions import Action, Plan
from megatron_prefix.pipeline.channels import Channels, colour

AHEAD = 2
"""Receives posted before they are needed; each holds one message's memory."""

Shape = Callable[[int], tuple[int, ...]]
Queue = collections.deque[Any]


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
        self._kinds = (("F", "B") if backward else ("F",)) if channels.size > 1 else ()
        self._expected = {
            kind: collections.deque(messages(plan, channels.source(kind), kind))
            for kind in self._kinds
        }
        self._sent: dict[str, Queue] = {kind: collections.deque() for kind in self._kinds}
        self._posted: dict[str, Queue] = {kind: collections.deque() for kind in self._kinds}
        self._arrived: dict[Action, Tensor] = {}

    def send(self, action: Action, tensor: Tensor) -> None:
        """Sends what `action` made to the stage that waits for it; returns at once."""
        self._issue_send(action.kind, tensor.detach().contiguous())

    def receive(self, action: Action) -> Tensor:
        """What `action` needs from its neighbour; the host waits until it is there.

        Raises:
            RuntimeError: the neighbour is gone or silent for the process group's timeout.
        """
        kind = action.kind
        while action not in self._arrived:
            self._post_ahead(kind)
            self._take(kind, f"waiting for {action} of pipeline rank {self._channels.source(kind)}")
        self._post_ahead(kind)
        return self._arrived.pop(action)

    def pace(self) -> None:
        """Called after every action."""

    def finish(self) -> None:
        """Waits until everything sent has left."""
        for kind, queue in self._sent.items():
            while queue:
                self._wait(queue.popleft()[0], f"sending the last {kind} messages of the step")

    def _post_ahead(self, kind: str) -> None:
        while self._expected[kind] and len(self._posted[kind]) < AHEAD:
            self._issue_receive(kind)

    def _issue_send(self, kind: str, tensor: Tensor) -> None:
        target = self._channels.ranks[self._channels.target(kind)]
        group = self._channels.groups[kind, colour(self._channels.rank, self._channels.size)]
        self._sent[kind].append((dist.isend(tensor, target, group=group), tensor))

    def _issue_receive(self, kind: str) -> None:
        action, source = self._expected[kind].popleft(), self._channels.source(kind)
        tensor = torch.empty(self._shape(action.segment), dtype=self._dtype, device=self._device)
        group = self._channels.groups[kind, colour(source, self._channels.size)]
        work = dist.irecv(tensor, self._channels.ranks[source], group=group)
        self._posted[kind].append((work, action, tensor))

    def _take(self, kind: str, doing: str) -> None:
        """Waits for the receive posted first."""
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
                f"pipeline rank {self._channels.rank}, {doing}: {error}. A neighbour has failed or"
                " hangs; its own log says why"
            ) from error
