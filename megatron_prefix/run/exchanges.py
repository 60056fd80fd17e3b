"""Payloads of shared prompts and their gradients between data-parallel ranks.

A prompt whose rollouts are on several ranks runs on one of them. Here its payload leaves for the
others, layer by layer, and their gradients come back. Messages go through a communicator of their
own, made of the trainer's ranks, in one order on all of them (plan/exchanges.py): a send never
waits, a payload is waited for when a segment is about to read it, and gradients before the backward
that needs them. Nothing is scaled here: what a rank sends back has the scale of its own losses.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.plan.exchanges import coming_back
from megatron_prefix.sidecar.arena import Payload, wider
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree import Forest
from megatron_prefix.tree.forest import Exchange
from megatron_prefix.tree.payload_map import Form

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DIMENSIONS = 6
"""Most dimensions of a row of a payload."""
Row = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a row of one tensor of a payload."""


@dataclass
class Crossed:
    """What one rank exchanged in a step.

    Attributes:
        received_tokens, sent_tokens: positions of payloads; those that go to several ranks count
            for each of them.
        received_bytes, sent_bytes: of payloads and of gradients.
        waited: seconds in which the host waited for messages; None on a GPU, where a stream does.
    """

    received_tokens: int = 0
    sent_tokens: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    waited: float | None = None


class Communicator:
    """Messages among the ranks of a group, apart from all others.

    Args:
        group: the trainer's; all of its ranks make this together.
        device: where its tensors live.

    Attributes:
        ranks: their numbers in the job.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.ranks, self._device = dist.get_process_group_ranks(group), device
        timeout = group._get_backend(device).options._timeout  # torch has no public name for it
        self._group = dist.new_group(self.ranks, timeout=timeout, use_local_synchronization=True)
        # NCCL connects at first use, and for messages in batches all ranks must take part in it.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        self._told: set[int] = set()
        self._rows: dict[int, list[list[Row]]] = {}

    def send(self, peer: int, tensors: Sequence[Tensor]) -> list[Any]:
        """Sends tensors to a place in the group."""
        return self._exchange(dist.isend, peer, [one.contiguous() for one in tensors])

    def receive(self, peer: int, tensors: Sequence[Tensor]) -> list[Any]:
        """Fills tensors with what a place in the group sends."""
        return self._exchange(dist.irecv, peer, tensors)

    def tell_rows(self, peer: int, payload: Sequence[Payload]) -> None:
        """Says what rows of payloads are, before the first one that a peer gets."""
        if peer in self._told:
            return
        self._told.add(peer)
        numbers = []
        for tensor in itertools.chain.from_iterable(payload):
            shape = list(tensor.shape[1:])
            numbers += [_DTYPES.index(tensor.dtype), len(shape), *shape]
            numbers += [0] * (_DIMENSIONS - len(shape))
        counts = [len(parts) for parts in payload]
        for message in (torch.tensor(counts), torch.tensor(numbers)):
            dist.send(message.to(self._device), self.ranks[peer], group=self._group)

    def rows(self, peer: int, num_layers: int) -> list[list[Row]]:
        """What rows of payloads are that a peer sends; waits for it the first time."""
        if peer not in self._rows:
            counts = self._numbers(peer, num_layers)
            numbers = self._numbers(peer, sum(counts) * (2 + _DIMENSIONS))
            rows = iter(
                _row(numbers[at : at + 2 + _DIMENSIONS])
                for at in range(0, len(numbers), 2 + _DIMENSIONS)
            )
            self._rows[peer] = [list(itertools.islice(rows, count)) for count in counts]
        return self._rows[peer]

    def _numbers(self, peer: int, count: int) -> list[int]:
        numbers = torch.zeros(count, dtype=torch.int64, device=self._device)
        dist.recv(numbers, self.ranks[peer], group=self._group)
        return numbers.tolist()

    def _exchange(self, way: Any, peer: int, tensors: Sequence[Tensor]) -> list[Any]:
        """All messages of one payload at once: NCCL then needs one kernel for them."""
        other = self.ranks[peer]
        return dist.batch_isend_irecv(
            [dist.P2POp(way, tensor, other, self._group) for tensor in tensors]
        )


_made: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def communicator_of(group: Any, device: torch.device) -> Iterator[Communicator | None]:
    """The communicator of a group, made once; given up when a step fails, as messages of that step
    may still be in it. All ranks of the group call this. None without a group."""
    if group is None:
        yield None
        return
    if group not in _made:
        _made[group] = Communicator(group, device)
    try:
        yield _made[group]
    except BaseException:
        _made.pop(group, None)
        raise


def _row(numbers: Sequence[int]) -> Row:
    dtype, num, *shape = numbers
    return tuple(shape[:num]), _DTYPES[dtype]


class Exchanges:
    """What crosses data-parallel ranks in one step, on one of them.

    Args:
        forest: the step's segments.
        communicator: of the data-parallel ranks, whose places in it name them.
        cache: the sidecar of the rank's model.
        device: of the model.
        forward_only: no gradients come back.

    Attributes:
        crossed: what has been exchanged so far.

    Raises:
        ValueError: several windows: rows of gradients could be taken again while they leave.
    """

    def __init__(
        self,
        forest: Forest,
        communicator: Communicator,
        cache: SidecarCache,
        device: torch.device,
        forward_only: bool = False,
    ) -> None:
        if forest.num_windows > 1:
            raise ValueError("a step with exchanges has one window")
        self._of = {one.segment: one for one in forest.exchanges}
        self._segments, self._communicator, self._cache = forest.segments, communicator, cache
        self._device, self._forward_only = device, forward_only
        self.crossed = Crossed(waited=0.0 if device.type == "cpu" else None)
        self._sent: list[tuple[list[Any], list[Tensor]]] = []
        self._coming: dict[int, tuple[list[Any], list[Payload]]] = {}
        windows = [coming_back(forest, number) for number in range(forest.num_windows)]
        self._back = {one.segment: alike for some in windows for alike in some for one in alike}

    def begin(self, index: int) -> None:
        """Begins to get a segment's payload."""
        ((owner, spans),) = self._of[index].peers
        payload = self._empty(owner, index, spans, gradients=False)
        self.crossed.received_tokens += self._positions(index, spans)
        self._coming[index] = self._receive(owner, payload), payload

    def arrive(self, segments: Iterable[int]) -> None:
        """Waits for payloads that are about to be read."""
        for index in segments:
            if index in self._coming:
                works, payload = self._coming.pop(index)
                self._wait(works)
                for layer, parts in enumerate(payload):
                    self._cache.capture(layer, index, parts)

    def leave(self, index: int) -> None:
        """Sends a segment's payload to the ranks that have rollouts below it."""
        for peer, spans in self._of[index].peers if index in self._of else ():
            payload = self._cache.leaving(index, spans)
            self._communicator.tell_rows(peer, payload)
            self._send(peer, payload)
            self.crossed.sent_tokens += self._positions(index, spans)

    def come_back(self, index: int) -> None:
        """Lets gradients cross when a segment's backward is due: those of its payload and of all
        that are as deep, in the order of all ranks."""
        waiting = self._back.get(index, [])
        while waiting:
            one = waiting.pop(0)
            (self._give_back if self._segments[one.segment].source >= 0 else self._collect)(one)

    def _give_back(self, one: Exchange) -> None:
        """Sends the gradients of a payload to the rank that it came from."""
        self.arrive([one.segment])
        ((owner, _),) = one.peers
        if not self._forward_only:
            self._send(owner, self._cache.sums(one.segment))

    def _collect(self, one: Exchange) -> None:
        """Adds the gradients of a segment's payload that other ranks send back."""
        index = one.segment
        for peer, spans in one.peers if not self._forward_only else ():
            gradients = self._empty(None, index, spans, gradients=True)
            self._wait(self._receive(peer, gradients))
            self._cache.add_to(index, spans, gradients)

    def finish(self) -> None:
        """Waits until everything sent has left."""
        while self._sent:
            self._wait(self._sent.pop()[0])

    def _send(self, peer: int, payload: Sequence[Payload]) -> None:
        tensors = [*itertools.chain.from_iterable(payload)]
        self.crossed.sent_bytes += sum(one.nbytes for one in tensors)
        self._sent.append((self._communicator.send(peer, tensors), tensors))  # they live till then

    def _receive(self, peer: int, payload: Sequence[Payload]) -> list[Any]:
        tensors = [*itertools.chain.from_iterable(payload)]
        self.crossed.received_bytes += sum(one.nbytes for one in tensors)
        return self._communicator.receive(peer, tensors)

    def _wait(self, works: Iterable[Any]) -> None:
        begin = time.perf_counter()
        for work in works:
            work.wait()
        if self.crossed.waited is not None:
            self.crossed.waited += time.perf_counter() - begin

    def _positions(self, index: int, spans: Sequence[int]) -> int:
        return sum(self._segments[index].spans[span].length for span in spans)

    def _empty(
        self, owner: int | None, index: int, spans: Sequence[int], *, gradients: bool
    ) -> list[Payload]:
        """Room for the payload of some spans in every layer, or for its gradients.

        Args:
            owner: the rank that says what rows are; None: this one's own payload does.
            index: the segment.
            spans: of it.
            gradients: whether for gradients, which are fp32 or wider.
        """
        forms = self._cache.forms
        if owner is None:
            own = (self._cache.own(layer, index) for layer in range(len(forms)))
            rows = [[(tuple(one.shape[1:]), one.dtype) for one in parts] for parts in own]
        else:
            rows = self._communicator.rows(owner, len(forms))
        nums = {
            Form.SPANS: len(spans),
            Form.POSITIONS: sum(self._segments[index].spans[span].padded for span in spans),
        }
        kind = wider if gradients else lambda dtype: dtype
        return [
            tuple(
                torch.empty((nums[form], *shape), dtype=kind(dtype), device=self._device)
                for shape, dtype in of_layer
            )
            for form, of_layer in zip(forms, rows, strict=True)
        ]  # fmt: skip
