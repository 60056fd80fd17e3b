"""Payloads of shared prompts and their gradients between data-parallel ranks.

A prompt whose rollouts are on several ranks runs on one of them. Here its payload leaves for the
others, layer by layer, and their gradients come back. Messages go through a communicator of their
own, made of the trainer's ranks, in one order on all of them (plan/planner.py), and those of a
level of the trees begin together: a send never waits, a payload is waited for when a segment is
about to read it, and gradients before the backward that needs them. Nothing is scaled here: what a
rank sends back has the scale of its own losses.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_prefix.device.clock import elapsed, now
from megatron_prefix.features.across.carried import Carried, Row
from megatron_prefix.features.across.communicator import Communicator, Message
from megatron_prefix.run.agreement import naming
from megatron_prefix.sidecar.arena import Payload, wider
from megatron_prefix.tree import Forest
from megatron_prefix.tree.forest import Exchange


@dataclass
class Crossed:
    """What one rank exchanged in a step.

    Attributes:
        received_tokens, sent_tokens: positions of payloads; those that go to several ranks count
            for each of them.
        received_bytes, sent_bytes: of payloads and of gradients.
        peak_bytes: the most that messages took at once: what has not been read, gradients that have
            not been added, and copies of what leaves.
        waits: begin and end of every wait for a message; see device/clock.py.
    """

    received_tokens: int = 0
    sent_tokens: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    peak_bytes: int = 0
    waits: list[tuple[Any, Any]] = field(default_factory=list)

    def waited(self) -> float:
        """Seconds of all waits; on a GPU the host waits for the last one to end."""
        if self.waits and isinstance(self.waits[-1][1], torch.cuda.Event):
            self.waits[-1][1].synchronize()
        return sum(elapsed(*wait) for wait in self.waits)


class Exchanges:
    """What crosses data-parallel ranks in one step, on one of them.

    Args:
        forest: the step's segments.
        communicator: of the data-parallel ranks, whose places in it name them.
        chunks: what crosses of each of the rank's model chunks.
        device: of the model.
        forward_only: no gradients come back.

    Attributes:
        crossed: what has been exchanged so far.
        held_bytes: that messages take now; see `Crossed.peak_bytes`.
    """

    def __init__(
        self,
        forest: Forest,
        communicator: Communicator,
        chunks: Sequence[Carried],
        device: torch.device,
        forward_only: bool = False,
    ) -> None:
        self._level_of = {exchange.segment: exchange.depth for exchange in forest.exchanges}
        levels = itertools.groupby(forest.exchanges, lambda one: one.depth)
        self._levels = [[*of_level] for _, of_level in levels]
        self._crossed = [0] * len(chunks)
        self._returned = [len(self._levels)] * len(chunks)
        self._segments, self._communicator, self._chunks = forest.segments, communicator, chunks
        self._device, self._forward_only = device, forward_only
        self.crossed = Crossed()
        self._known = [
            [communicator.known(chunk.model, forward_only, scored) for scored in (False, True)]
            for chunk in chunks
        ]
        self._waiting: list[Message] = []
        self.held_bytes = 0
        # By segment and chunk: tensors live until they have left; and the bytes that are copies.
        self._sent: dict[tuple[int, int], list[tuple[Message, int]]] = {}
        self._coming: dict[tuple[int, int], tuple[Message, list[Payload]]] = {}
        self._coming_back: dict[tuple[int, int], list[Any]] = {}

    def forward(self, index: int, chunk: int, read: Iterable[int]) -> None:
        """Before a segment runs forward: the levels above it cross.

        Args:
            index: the segment.
            chunk: the model chunk.
            read: the segments that it reads; their payloads are waited for.
        """
        self._forget()
        level = self._level_of.get(index, len(self._levels))
        for one in range(len(self._chunks)):  # a rank's own segments come behind those of all
            if one < chunk or level == len(self._levels):
                self._cross(one, len(self._levels))
        self._cross(chunk, level)
        for visible in read:
            self._arrive(visible, chunk)

    def backward(self, index: int, chunk: int) -> None:
        """Before a segment runs backward: gradients of its level cross, and its own are there."""
        level = self._level_of.get(index, len(self._levels))
        self._forget()
        self._cross(chunk, len(self._levels))
        while self._returned[chunk] > level:
            self._returned[chunk] -= 1
            for one in reversed(self._levels[self._returned[chunk]]):
                self._give_back(one, chunk)
            self._begin()
        for spans, coming, gradients in self._coming_back.pop((index, chunk), ()):
            self._wait(coming, f"waiting for gradients of segment {index} of")
            self._chunks[chunk].add_to(index, spans, gradients)
            self._hold(-_size(coming))
        if self._segments[index].source < 0:  # whoever has sent gradients of a payload has that
            for message, size in self._sent.pop((index, chunk), ()):
                self._wait(message, "sending to")
                self._hold(-size)

    def _cross(self, chunk: int, level: int) -> None:
        """Lets the levels before one cross that have not."""
        while self._crossed[chunk] < level:
            for one in self._levels[self._crossed[chunk]]:
                self._leave(one, chunk)
            self._begin()
            self._crossed[chunk] += 1

    def _leave(self, one: Exchange, chunk: int) -> None:
        """Begins to get a payload, or to send it to the ranks that have rollouts below it."""
        carried, segment = self._chunks[chunk], self._segments[one.segment]
        known = self._known[chunk][segment.scored]
        for peer, spans in one.peers:
            if segment.source >= 0:
                with self._named("waiting for the first payload of", peer):
                    rows = self._communicator.rows(peer, known, len(carried.forms))
                payload = self._empty(rows, one.segment, chunk, spans)
                self._coming[one.segment, chunk] = self._receive(peer, payload), payload
                self.crossed.received_tokens += self._positions(one, spans, chunk)
            else:
                payload = carried.leaving(one.segment, spans)
                broadcast = self._communicator.tell_rows(peer, known, payload)
                if broadcast is not None:
                    self._keep(one.segment, chunk, broadcast, 0)
                apart = spans[-1] - spans[0] >= len(spans) or carried.gathers
                message = self._send(peer, payload)
                self._keep(one.segment, chunk, message, _size(message) * apart)
                self.crossed.sent_tokens += self._positions(one, spans, chunk)

    def _give_back(self, one: Exchange, chunk: int) -> None:
        """Sends the gradients of a payload to the rank that it came from, or begins to get them."""
        carried, index = self._chunks[chunk], one.segment
        for peer, spans in one.peers:
            if self._segments[index].source >= 0:
                self._arrive(index, chunk)
                if not self._forward_only:
                    *layers, states, routed = carried.sums(index)
                    message = self._send(peer, [*layers, states, routed])
                    self._keep(index, chunk, message, sum(state.nbytes for state in states))
            elif not self._forward_only:
                rows = [
                    [(shape, wider(dtype)) for shape, dtype in of] for of in carried.rows(index)
                ]
                gradients = self._empty(rows, index, chunk, spans)
                coming = spans, self._receive(peer, gradients), gradients
                self._coming_back.setdefault((index, chunk), []).append(coming)

    def _arrive(self, index: int, chunk: int) -> None:
        if (index, chunk) in self._coming:
            coming, payload = self._coming.pop((index, chunk))
            self._wait(coming, f"waiting for segment {index} of")
            self._chunks[chunk].arrived(index, payload)
            self._hold(-_size(coming))

    def finish(self) -> None:
        """Waits until everything sent has left."""
        for message, _ in itertools.chain(*self._sent.values()):
            self._wait(message, "sending to")
        self._sent.clear()

    def _forget(self) -> None:
        """Drops what has left, as far as that is known without waiting (gloo never knows)."""
        for key, some in self._sent.items():
            remaining = [one for one in some if not _done(one[0])]
            self._hold(sum(size for _, size in remaining) - sum(size for _, size in some))
            self._sent[key] = remaining

    def _keep(self, index: int, chunk: int, message: Message, num_bytes: int) -> None:
        """Keeps what is sent of a segment until it has left; so many bytes of it are copies."""
        self._sent.setdefault((index, chunk), []).append((message, num_bytes))
        self._hold(num_bytes)

    def _hold(self, num_bytes: int) -> None:
        """Counts bytes that messages take (negative: no longer)."""
        self.held_bytes += num_bytes
        self.crossed.peak_bytes = max(self.crossed.peak_bytes, self.held_bytes)

    def _send(self, peer: int, payload: Sequence[Payload]) -> Message:
        message = Message(dist.isend, peer, [*itertools.chain.from_iterable(payload)])
        self.crossed.sent_bytes += _size(message)
        self._waiting.append(message)
        return message

    def _receive(self, peer: int, payload: Sequence[Payload]) -> Message:
        message = Message(dist.irecv, peer, [*itertools.chain.from_iterable(payload)])
        self.crossed.received_bytes += _size(message)
        self._hold(_size(message))
        self._waiting.append(message)
        return message

    def _begin(self) -> None:
        """Begins the messages of a level."""
        self._communicator.exchange(self._waiting)
        self._waiting = []

    def _named(self, doing: str, peer: int) -> contextlib.AbstractContextManager[None]:
        who = f"data-parallel rank {self._communicator.rank}"
        return naming(f"{who}, {doing} data-parallel rank {peer}", self._communicator.ranks[peer])

    def _wait(self, message: Message, doing: str) -> None:
        begin = now(self._device)
        with self._named(doing, message.peer):
            for work in message.works:
                work.wait()
        self.crossed.waits.append((begin, now(self._device)))

    def _positions(self, one: Exchange, spans: Sequence[int], chunk: int) -> int:
        """Of some spans; the first model chunk counts them, the others have the same."""
        return sum(self._segments[one.segment].spans[span].length for span in spans if not chunk)

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
            form: sum(form.rows(of[span].padded, carried.parts) for span in spans)
            for form in {*carried.forms}
        }
        return [
            tuple(
                torch.empty((nums[form], *shape), dtype=dtype, device=self._device)
                for shape, dtype in of_layer
            )
            for form, of_layer in zip(carried.forms, rows, strict=True)
        ]  # fmt: skip


def _size(message: Message) -> int:
    return sum(tensor.nbytes for tensor in message.tensors)


def _done(message: Message) -> bool:
    """Whether a message that has begun is known to have ended."""
    return bool(message.works) and all(work.is_completed() for work in message.works)
