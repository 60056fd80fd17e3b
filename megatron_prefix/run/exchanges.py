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
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.run.carried import Carried, Row
from megatron_prefix.sidecar.arena import Payload, wider
from megatron_prefix.tree import Forest
from megatron_prefix.tree.forest import Exchange
from megatron_prefix.tree.payload_map import Form

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Coming = tuple[list[Any], list[Tensor]]
"""Works, and the tensors that they send or fill."""
_DIMENSIONS = 6
"""Most dimensions of a row of a payload."""


@dataclass
class Known:
    """What ranks have said of a model chunk's payloads, by place in the group.

    Attributes:
        told: who has heard what this rank sends.
        rows: of every layer, what others send.
    """

    told: set[int] = field(default_factory=set)
    rows: dict[int, list[list[Row]]] = field(default_factory=dict)


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
        self._known: weakref.WeakKeyDictionary[Any, dict[bool, Known]] = weakref.WeakKeyDictionary()

    def send(self, peer: int, tensors: Sequence[Tensor]) -> Coming:
        """Sends tensors to a place in the group; returns them as they are sent."""
        whole = [one.contiguous() for one in tensors]
        return self._exchange(dist.isend, peer, whole), whole

    def receive(self, peer: int, tensors: Sequence[Tensor]) -> list[Any]:
        """Fills tensors with what a place in the group sends."""
        return self._exchange(dist.irecv, peer, tensors)

    def known(self, model: Any, forward_only: bool) -> Known:
        """What ranks know of one another's payloads of a model chunk. They are others in passes
        without gradients, where routers count nothing."""
        return self._known.setdefault(model, {}).setdefault(forward_only, Known())

    def tell_rows(self, peer: int, known: Known, payload: Sequence[Payload]) -> Coming:
        """Says what rows of a model chunk's payloads are, before the first one that a peer gets."""
        if peer in known.told:
            return [], []
        known.told.add(peer)
        numbers = []
        for tensor in itertools.chain.from_iterable(payload):
            shape = list(tensor.shape[1:])
            numbers += [_DTYPES.index(tensor.dtype), len(shape), *shape]
            numbers += [0] * (_DIMENSIONS - len(shape))
        counts = [len(parts) for parts in payload]
        works, messages = [], [torch.tensor(each).to(self._device) for each in (counts, numbers)]
        for message in messages:  # one by one: the second's length is in the first
            works += self._exchange(dist.isend, peer, [message])
        return works, messages

    def rows(self, peer: int, known: Known, num_layers: int) -> list[list[Row]]:
        """What rows of payloads are that a peer sends; waits for it the first time."""
        if peer not in known.rows:
            counts = self._numbers(peer, num_layers)
            numbers = self._numbers(peer, sum(counts) * (2 + _DIMENSIONS))
            rows = iter(
                _row(numbers[at : at + 2 + _DIMENSIONS])
                for at in range(0, len(numbers), 2 + _DIMENSIONS)
            )
            known.rows[peer] = [list(itertools.islice(rows, count)) for count in counts]
        return known.rows[peer]

    def _numbers(self, peer: int, count: int) -> list[int]:
        numbers = torch.zeros(count, dtype=torch.int64, device=self._device)
        _wait(self._exchange(dist.irecv, peer, [numbers]))
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
        chunks: what crosses of each of the rank's model chunks.
        device: of the model.
        forward_only: no gradients come back.

    Raises:
        ValueError: several windows: rows of gradients could be taken again while they leave.
    """

    def __init__(
        self,
        forest: Forest,
        communicator: Communicator,
        chunks: Sequence[Carried],
        device: torch.device,
        forward_only: bool = False,
    ) -> None:
        if forest.num_windows > 1:
            raise ValueError("a step with exchanges has one window")
        self._level_of = {one.segment: one.level for one in forest.exchanges}
        levels = itertools.groupby(forest.exchanges, lambda one: one.level)
        self._levels = [[*of_level] for _, of_level in levels]
        self._crossed = [0] * len(chunks)
        self._returned = [len(self._levels)] * len(chunks)
        self._segments, self._communicator, self._chunks = forest.segments, communicator, chunks
        self._device, self._forward_only = device, forward_only
        self._known = [communicator.known(one.model, forward_only) for one in chunks]
        self._sent: list[Coming] = []
        self._coming: dict[tuple[int, int], tuple[list[Any], list[Payload]]] = {}
        self._coming_back: dict[tuple[int, int], list[Any]] = {}

    def forward(self, index: int, chunk: int, read: Iterable[int]) -> None:
        """Before a segment runs forward: the levels above it cross.

        Args:
            index: the segment.
            chunk: the model chunk.
            read: the segments that it reads; their payloads are waited for.
        """
        while self._crossed[chunk] < self._level_of.get(index, len(self._levels)):
            for one in self._levels[self._crossed[chunk]]:
                self._leave(one, chunk)
            self._crossed[chunk] += 1
        for seen in read:
            self._arrive(seen, chunk)

    def backward(self, index: int, chunk: int) -> None:
        """Before a segment runs backward: gradients of its level cross, and its own are there."""
        level = self._level_of.get(index, len(self._levels))
        self.forward(-1, chunk, ())
        while self._returned[chunk] > level:
            self._returned[chunk] -= 1
            for one in reversed(self._levels[self._returned[chunk]]):
                self._give_back(one, chunk)
        for spans, (works, gradients) in self._coming_back.pop((index, chunk), ()):
            _wait(works)
            self._chunks[chunk].add_to(index, spans, gradients)

    def _leave(self, one: Exchange, chunk: int) -> None:
        """Begins to get a payload, or to send it to the ranks that have rollouts below it."""
        carried = self._chunks[chunk]
        for peer, spans in one.peers:
            if self._segments[one.segment].source >= 0:
                rows = self._communicator.rows(peer, self._known[chunk], len(carried.forms))
                payload = self._empty(rows, one.segment, chunk, spans)
                self._coming[one.segment, chunk] = self._receive(peer, payload), payload
            else:
                payload = carried.leaving(one.segment, spans)
                self._keep(self._communicator.tell_rows(peer, self._known[chunk], payload))
                self._send(peer, payload)

    def _give_back(self, one: Exchange, chunk: int) -> None:
        """Sends the gradients of a payload to the rank that it came from, or begins to get them."""
        carried, index = self._chunks[chunk], one.segment
        for peer, spans in one.peers:
            if self._segments[index].source >= 0:
                self._arrive(index, chunk)
                if not self._forward_only:
                    self._send(peer, carried.sums(index))
            elif not self._forward_only:
                rows = [
                    [(shape, wider(dtype)) for shape, dtype in of] for of in carried.rows(index)
                ]
                gradients = self._empty(rows, index, chunk, spans)
                coming = spans, (self._receive(peer, gradients), gradients)
                self._coming_back.setdefault((index, chunk), []).append(coming)

    def _arrive(self, index: int, chunk: int) -> None:
        if (index, chunk) in self._coming:
            works, payload = self._coming.pop((index, chunk))
            _wait(works)
            self._chunks[chunk].arrived(index, payload)

    def finish(self) -> None:
        """Waits until everything sent has left."""
        while self._sent:
            _wait(self._sent.pop()[0])

    def _send(self, peer: int, payload: Sequence[Payload]) -> None:
        self._keep(self._communicator.send(peer, [*itertools.chain.from_iterable(payload)]))

    def _keep(self, sent: Coming) -> None:
        self._sent.append(sent)  # tensors live until they have left

    def _receive(self, peer: int, payload: Sequence[Payload]) -> list[Any]:
        return self._communicator.receive(peer, [*itertools.chain.from_iterable(payload)])

    def _empty(
        self, rows: Sequence[Sequence[Row]], index: int, chunk: int, spans: Sequence[int]
    ) -> list[Payload]:
        """Room for this rank's part of some spans of a segment, in every layer.

        Args:
            rows: of every layer.
            index: the segment.
            chunk: the model chunk.
            spans: of the segment.
        """
        carried, of = self._chunks[chunk], self._segments[index].spans
        nums = {
            Form.SPANS: len(spans),
            Form.POSITIONS: sum(of[span].padded for span in spans) // carried.parts,
        }
        return [
            tuple(
                torch.empty((nums[form], *shape), dtype=dtype, device=self._device)
                for shape, dtype in of_layer
            )
            for form, of_layer in zip(carried.forms, rows, strict=True)
        ]


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
