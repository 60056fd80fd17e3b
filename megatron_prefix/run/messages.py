"""Messages between pipeline stages, issued in the order of the plan's timetable.

Both ends of a link and the whole pipeline keep to one order (plan/timetable.py says why nothing can
wait for ever), so the host never waits for a neighbour on a GPU: a receive is issued between
two actions and only the action that uses it waits, on the device; a send is issued behind its
action and nothing waits for it.  Over gloo the host moves the messages, in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.timetable import Message, exchanges
from megatron_prefix.run.channels import Channels, colour
from megatron_prefix.run.hosts import named

Shape = Callable[[int], tuple[int, ...]]


def message_shape(config: Any, plan: Plan) -> Shape:
    """Shape of a segment's activations between two stages (and of their gradients)."""
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    parts *= config.context_parallel_size
    return lambda index: (plan.segments[index].padded_length // parts, 1, config.hidden_size)


def message_dtype(config: Any) -> torch.dtype:
    """Dtype of all messages."""
    return torch.float32 if config.fp32_residual_connection else config.pipeline_dtype


class Links:
    """One rank's messages during one step.

    Args:
        channels: the pipeline's channels.
        plan: the step's plan; pipelines that run side by side give the same.
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
        self._kinds = ("F", "B") if backward else ("F",)
        self._gaps = iter(exchanges(plan, channels.rank) if channels.size > 1 else ())
        self._made: dict[Action, Tensor] = {}
        self._sent: list[tuple[Any, Tensor, int]] = []
        self._coming: dict[Action, tuple[Any, int, Tensor]] = {}
        self.advance()

    def send(self, action: Action, tensor: Tensor) -> None:
        """Hands over what `action` made for the stage that waits for it; it leaves in its turn."""
        self._made[action] = tensor.detach().contiguous()

    def receive(self, action: Action) -> Tensor:
        """What `action` needs from its neighbour; whoever reads it waits until it is there.

        Raises:
            RuntimeError: the neighbour is gone or silent for the process group's timeout.
        """
        if action not in self._coming:
            raise RuntimeError(f"{action} is to receive a message that the plan does not have")
        work, sender, tensor = self._coming.pop(action)
        with self._named(f"waiting for {action} of", sender):
            work.wait()
        return tensor

    def advance(self) -> None:
        """Issues the messages up to the rank's next action; called behind every action."""
        self._sent = [sent for sent in self._sent if not sent[0].is_completed()]
        for message in next(self._gaps, ()):
            if message.used_by.kind in self._kinds:
                # A neighbour that is gone may show here already.
                with self._named(*self._doing(message)):
                    self._issue(message)

    def finish(self) -> None:
        """Waits until everything sent has left."""
        while self._sent:
            work, _, receiver = self._sent.pop()
            with self._named("sending the last message of the step to", receiver):
                work.wait()

    def _doing(self, message: Message) -> tuple[str, int]:
        if message.sender == self._channels.rank:
            return f"sending {message.used_by} to", message.receiver
        return f"waiting for {message.used_by} of", message.sender

    def _issue(self, message: Message) -> None:
        kind, sends = message.used_by.kind, message.sender == self._channels.rank
        group = self._channels.groups[kind, colour(message.sender, self._channels.size)]
        if sends:
            tensor = self._made.pop(message.made_by)
            work = dist.isend(tensor, self._channels.ranks[message.receiver], group=group)
            self._sent.append((work, tensor, message.receiver))  # it lives until it has left
            return
        shape = self._shape(message.used_by.segment)
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(tensor, self._channels.ranks[message.sender], group=group)
        self._coming[message.used_by] = work, message.sender, tensor

    @contextlib.contextmanager
    def _named(self, doing: str, neighbour: int) -> Iterator[None]:
        """Says in an error what this rank was doing, and with which pipeline rank."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"pipeline rank {self._channels.rank}, {doing} pipeline rank {neighbour}: {error}."
                " A neighbour has failed, hangs, or needs longer than --message-timeout-minutes;"
                f" the log of {named(self._channels.ranks[neighbour])} says why"
            ) from error
