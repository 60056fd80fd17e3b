"""Messages between pipeline stages, and sums, issued in the order of the plan's timetable.

Both ends of a link and the whole pipeline keep to one order (plan/timetable.py says why nothing can
wait for ever), so the host never waits for a neighbour on a GPU: a receive is issued between
two actions and only the action that uses it waits, on the device; a send is issued behind its
action and nothing waits for it.  Over gloo the host moves the messages, in the same order.

They travel in process groups of their own, made once a job.  The operations of one process group
may run one after the other, so no rank has more than one link, to one neighbour in one direction,
in any of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.layers.model import sent_width
from megatron_prefix.parts import StepPart
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.timetable import Depths, StageMessage, Sum, message_gaps
from megatron_prefix.run.agreement import naming
from megatron_prefix.run.rank import Rank

ShapeOf = Callable[[Action], tuple[int, ...]]
"""Shape of the message that an action of this rank waits for."""


@dataclass(frozen=True)
class Channels:
    """The process groups of a pipeline's messages.

    Attributes:
        ranks: global ranks of the pipeline in order.
        groups: by direction ("F": to the next rank, "B": to the previous) and the colour of the
            sender, see `colour`.
    """

    ranks: tuple[int, ...]
    rank: int
    groups: dict[tuple[str, int], Any]

    @property
    def size(self) -> int:
        return len(self.ranks)


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
    groups: dict[tuple[str, int], Any] = {}
    if len(ranks) > 1:
        timeout = group._get_backend(device).options._timeout  # torch has no public name for it
        pipelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pipelines, ranks)
        every = [list(pipeline) for pipeline in sorted(set(pipelines))]
        for key in itertools.product("FB", range(2 + len(ranks) % 2)):  # see `colour`
            groups[key] = dist.new_subgroups_by_enumeration(every, timeout=timeout)[0]
    channels = Channels(ranks, rank, groups)
    for kind, sender in itertools.product("FB" if groups else "", range(len(ranks))):
        _first_use(channels, kind, sender, device)
    _made[group] = channels
    return channels


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


def message_shape(rank: Rank, plan: Plan) -> ShapeOf:
    """Shape of a segment's activations between two stages (and of their gradients)."""
    parts = rank.model.sequence_ranks * rank.config.context_parallel_size

    @functools.cache
    def width(kind: str, chunk: int) -> int:
        layers = rank.language_models[chunk].decoder.layers
        # A stage without layers is in front of all of them, or behind.
        numbers = [layer.layer_number for layer in layers] or [rank.config.num_layers + 1, 0]
        return sent_width(rank.config, numbers[-1] if kind == "B" else numbers[0] - 1)

    lengths = [segment.padded_length // parts for segment in plan.segments]
    return lambda action: (lengths[action.segment], 1, width(action.kind, action.chunk))


def message_dtype(config: Any) -> torch.dtype:
    """Dtype of all messages."""
    return torch.float32 if config.fp32_residual_connection else config.pipeline_dtype


class Links:
    """One rank's messages during one step, and when sums of its parts begin."""

    def __init__(
        self,
        channels: Channels,
        plan: Plan,
        shape: ShapeOf,
        dtype: torch.dtype,
        device: torch.device,
        backward: bool,
        parts: Sequence[StepPart] = (),
        depths: Depths = (),
    ) -> None:
        self._channels, self._shape, self._dtype, self._device = channels, shape, dtype, device
        self._kinds = ("F", "B") if backward else ("F",)
        self._parts, sums = parts, [each for part in parts for each in part.sums]
        is_needed = channels.size > 1 or sums
        self._gaps = iter(message_gaps(plan, channels.rank, depths, *sums) if is_needed else ())
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
        """Issues messages up to the next stop; called behind every action, and before each one,
        when what crosses data-parallel ranks before it has crossed."""
        self._sent = [sent for sent in self._sent if not sent[0].is_completed()]
        for message in next(self._gaps, ()):
            if isinstance(message, Sum):
                for part in self._parts:
                    part.sum(message.number)
            elif message.used_by.kind in self._kinds:
                self._issue(message)

    def finish(self) -> None:
        while self._sent:
            work, _, receiver = self._sent.pop()
            with self._named("sending the last message of the step to", receiver):
                work.wait()

    def _issue(self, message: StageMessage) -> None:
        action, sender, receiver = message.used_by, message.sender, message.receiver
        group = self._channels.groups[action.kind, colour(sender, self._channels.size)]
        if sender == self._channels.rank:
            with self._named(f"sending {action} to", receiver):
                tensor = self._made.pop(message.made_by)
                work = dist.isend(tensor, self._channels.ranks[receiver], group=group)
            self._sent.append((work, tensor, receiver))  # it lives until it has left
            return
        with self._named(f"waiting for {action} of", sender):
            tensor = torch.empty(self._shape(action), dtype=self._dtype, device=self._device)
            work = dist.irecv(tensor, self._channels.ranks[sender], group=group)
        self._coming[action] = work, sender, tensor

    def _named(self, doing: str, neighbour: int) -> contextlib.AbstractContextManager[None]:
        what = f"pipeline rank {self._channels.rank}, {doing} pipeline rank {neighbour}"
        return naming(what, self._channels.ranks[neighbour])
