"""Buffers of messages between data-parallel ranks while a program runs.  Pure.

A received payload (exchanges.py) waits in its own buffer until a segment reads it.
A sent payload is a view of the sidecar if its spans are neighbours, else a copy, which lives until
the peer's gradients are back: only then is it certain everywhere that the send has ended. Gradients
of a level have buffers, one per sending rank, from the first backward of the level to each
segment's own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from megatron_prefix.plan.actions import Action, Plan, Sent
from megatron_prefix.plan.memory import Messages
from megatron_prefix.tree.payload_map import Form


class ExchangeMemory:
    """Bytes of one model chunk's messages: `Buffers` of the footprint.

    Args:
        plan: whose `sent` says what leaves.
        rank: in the pipeline.
        chunk: the rank's model chunk.
        footprint: of the model.
        visible: per segment those that it reads.

    Attributes:
        crosses: whether there are any.
        held: bytes.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        chunk: int,
        footprint: Messages,
        visible: Callable[[int], Collection[int]],
    ) -> None:
        self._plan, self._footprint, self._visible = plan, footprint, visible
        stage = plan.stage(rank, chunk)
        self._payloads = footprint.payloads[stage] if stage < len(footprint.payloads) else ()
        self._is_last = stage == plan.num_stages - 1
        self.crosses = plan.crosses or bool(plan.sent)
        program = plan.programs[rank] if self.crosses else ()
        self._forward = dict(self._payloads_by_level(program, chunk))
        self._backward = dict(self._gradients_by_level(program, chunk))
        self._coming: dict[int, float] = {}
        self._copies: dict[int, float] = {}
        self._back: dict[int, float] = {}
        self.held = 0.0  # with copies of final states' gradients, until the step ends

    def post(self, action: Action) -> None:
        """Allocates buffers of messages that start with an action."""
        for index in self._forward.pop(action, ()):
            transfer = self._sent(index)
            if transfer is None:
                self._hold(self._coming, index, self._values(index, self._whole(index)))
                continue
            gathers = (
                self._footprint.shares == 1 < self._footprint.parts
            )  # rows lie as the parts of all ranks
            rows = transfer[:2] if gathers else (transfer.copied, transfer.copied_spans)
            self._hold(self._copies, index, self._values(index, rows))
        for index in self._backward.pop(action, ()):
            transfer = self._sent(index)
            size = 0.0 if transfer is None else self._gradients(index, transfer[:2])
            self._hold(self._back, index, size)

    def _hold(self, buffers: dict[int, float], index: int, size: float) -> None:
        self.held += size - buffers.get(index, 0.0)
        buffers[index] = size

    def take(self, action: Action) -> None:
        """Frees buffers of messages that an action waits for."""
        index = action.segment
        if action.kind == "F":
            received = self._plan.segments[index].source >= 0  # what it continues may be on its way
            for source in () if received else self._visible(index):
                self.held -= self._coming.pop(source, 0.0)
            return
        for buffers in (self._coming, self._back, self._copies):
            self.held -= buffers.pop(index, 0.0)
        segment = self._plan.segments[index]
        if segment.source >= 0 and segment.scored and self._is_last:
            self.held += self._whole(index)[0] / self._footprint.parts * self._footprint.state_grad

    def _payloads_by_level(
        self, program: Sequence[Action], chunk: int
    ) -> Iterator[tuple[Action, list[int]]]:
        """The action after each level's forwards, and the level's segments."""
        segments: dict[int, list[int]] = {}
        behind: dict[int, int] = {}
        for place, action in enumerate(program):
            level = self._level(action, "F", chunk)
            if level is not None:
                segments.setdefault(level, []).append(action.segment)
                behind[level] = place + 1
        for level, place in behind.items():
            if place < len(program):
                yield program[place], segments[level]

    def _gradients_by_level(
        self, program: Sequence[Action], chunk: int
    ) -> Iterator[tuple[Action, list[int]]]:
        """The first backward of each level, and the segments whose gradients it waits for."""
        levels: dict[int, tuple[Action, list[int]]] = {}
        for action in program:
            level = self._level(action, "B", chunk)
            if level is not None:
                _, waited = levels.setdefault(level, (action, []))
                waited += [action.segment] if self._sent(action.segment) is not None else []
        yield from levels.values()

    def _level(self, action: Action, kind: str, chunk: int) -> int | None:
        """Level of an action of this kind and chunk that crosses; None for all others."""
        index = action.segment
        received = self._plan.segments[index].source >= 0
        if action.kind != kind or action.chunk != chunk:
            return None
        if not received and self._sent(index) is None:
            return None
        return self._plan.sent[index].depth if self._plan.sent else 0

    def _sent(self, index: int) -> Sent | None:
        transfer = self._plan.sent[index] if self._plan.sent else None
        return transfer if transfer is not None and transfer.positions else None

    def _whole(self, index: int) -> tuple[int, int]:
        segment = self._plan.segments[index]
        return segment.padded_length, len(segment.spans)

    def _values(self, index: int, rows: tuple[int, ...]) -> float:
        """Bytes of payloads of `rows` (positions, spans); received states are counted elsewhere."""
        scored = self._plan.segments[index].scored and self._is_last
        is_counted = self._plan.segments[index].source >= 0 and self._footprint.parts == 1
        state = self._footprint.state if scored and not is_counted else 0.0
        return self._bytes([(of.form, of.values) for of in self._payloads], rows, state)

    def _gradients(self, index: int, rows: tuple[int, ...]) -> float:
        scored = self._plan.segments[index].scored and self._is_last
        state = self._footprint.state_grad if scored else 0.0
        return self._bytes([(of.form, of.gradients) for of in self._payloads], rows, state)

    def _bytes(
        self, payloads: Iterable[tuple[Form, float]], rows: tuple[int, ...], state: float
    ) -> float:
        positions, spans = rows[0] / self._footprint.parts, rows[1]
        num_bytes = positions * state
        for form, size in payloads:
            # Every context-parallel rank has the last positions of all.
            limit = positions if form.last is None else min(rows[0], form.last * spans)
            num_bytes += size * (spans if form == Form.SPANS else limit)
        return num_bytes
