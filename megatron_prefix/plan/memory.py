"""Device memory of every rank of a pipeline in one step, by numbers that were measured.  Pure.

Goes through a rank's program action by action. A forward adds what the segment's policy keeps. The
first live inner segment adds the arenas of K/V, the first backward that reads them those of gK/gV;
the last one frees both. A backward adds for its duration what it recomputes or loads, then frees
its segment. Weights, their gradients and the optimizer are not counted.

How much a position takes is measured (run/costs.py); what a span leaves in the sidecar
every kind of layer says (layers/kind.py, `payload`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.layer_numbers import Payload
from megatron_prefix.tree import Segment
from megatron_prefix.tree.payload_map import Form, PayloadMap, payload_map

MESSAGES = 4
"""Receives posted ahead and sends under way, both directions together (run/execute/messages.py)."""
LAYERS_VISITED, GRADIENTS_VISITED = 2, 3
"""With layers on the host, so many of them have K/V, or gK/gV, on the device at once: the one that
runs, the next, and for gK/gV those on their way back (features/host/arena.py)."""
LAYERS_LOADED = 3
"""Layers of an offloaded segment on the device at once (features/host/segment.py)."""

Sizes = Sequence[tuple[float, float]]
"""Per layer the bytes of its payload, and of its gradient."""


class Buffers(Protocol):
    """Memory of further messages of a model chunk, beyond those between stages, while its program
    runs."""

    @property
    def held(self) -> float:
        """Bytes."""
        ...

    def post(self, action: Action) -> None:
        """Allocates buffers of messages that start with an action."""
        ...

    def take(self, action: Action) -> None:
        """Frees buffers of messages that an action waits for."""
        ...


BuffersOf = Callable[["Plan", int, int, "Messages", Callable[[int], Collection[int]]], Buffers]


class Messages(Protocol):
    """What buffers ask of a footprint: see there."""

    @property
    def payloads(self) -> Sequence[Sequence[Payload]]: ...
    @property
    def parts(self) -> int: ...
    @property
    def shares(self) -> int: ...
    @property
    def state(self) -> float: ...
    @property
    def state_grad(self) -> float: ...


class StageBytes(NamedTuple):
    """Measured of a stage, on the rank that has most: bytes a position of a segment.

    Attributes:
        inner, wave: kept between the forward and the backward of an inner segment, and of a wave.
        scored: kept besides, a position that carries loss.
        span: kept besides, a wave's span that has a parent; bytes in all.
        moment: there while an action runs, besides what it keeps or makes again.
        before: of all positions of a step, there from before its first action to its end.
    """

    inner: float = 0.0
    wave: float = 0.0
    scored: float = 0.0
    span: float = 0.0
    moment: float = 0.0
    before: float = 0.0


StagesBytes = dict[bool, dict[int, StageBytes]]
"""Measured, by whether a step was shared, and by stage."""


@dataclass(frozen=True)
class RankMemory:
    """One rank's peak, in bytes, besides weights and gradients.

    Attributes:
        peak: largest sum.
        action: at the peak.
        kept, cache, moment: the parts of `peak`: what segments keep; K/V and gK/gV; messages and
            what the action has for its duration.
        held: at the peak, (segment, bytes) of segments between forward and backward.
        cache_peak, cache_staged: largest K/V and gK/gV on the device, and on the host.
        staged: largest offloaded segments on the host.
        exchanged: largest buffers of further messages.
    """

    peak: float
    action: Action
    kept: float = 0.0
    cache: float = 0.0
    moment: float = 0.0
    held: tuple[tuple[int, float], ...] = ()
    cache_peak: float = 0.0
    cache_staged: float = 0.0
    staged: float = 0.0
    exchanged: float = 0.0


class MemoryModel(Hashable, Protocol):
    """What says how much memory a plan takes: measured numbers, or others in their place."""

    @property
    def parts(self) -> int: ...
    @property
    def act(self) -> float: ...

    def peaks(self, plan: Plan) -> tuple[RankMemory, ...]:
        """Of every rank of a plan's pipeline."""
        ...

    def saved(self, plan: Plan, index: int) -> float:
        """Bytes that layers of a rank save of a segment whose policy leaves that on the device."""
        ...


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model on the ranks of one pipeline, a position unless said otherwise.

    Attributes:
        stages: measured, by stage; zeros where nothing is known yet.
        payloads: of every stage, those of its layers that leave one.
        message: between two stages.
        layers: of a model chunk.
        parts: context-parallel ranks, which share the positions.
        shares: into how many parts K/V and gK/gV of inner segments are cut; a rank has one.
        act: of what a stage keeps, what policy "recompute_act" drops.
        host_layers: see PrefixConfig.cache_host_layers.
        state, state_grad: a final hidden state that crosses data-parallel ranks, and its gradient.
        buffers: makes those of a plan, a rank, its model chunk and a footprint, with what says
            which segments a segment reads; None: there are no further messages.
    """

    stages: tuple[StageBytes, ...]
    payloads: tuple[tuple[Payload, ...], ...]
    message: float
    layers: int
    parts: int = 1
    shares: int = 1
    act: float = 0.0
    host_layers: int = 0
    state: float = 0.0
    state_grad: float = 0.0
    buffers: BuffersOf | None = None

    def peaks(self, plan: Plan) -> tuple[RankMemory, ...]:
        """See MemoryModel."""
        return _of_ranks(plan, self)

    def saved(self, plan: Plan, index: int) -> float:
        """See MemoryModel; of the stage that saves most."""
        stages = (self._saved(plan, index, numbers) for numbers in self.stages)
        return max(stages, default=0.0) * plan.num_chunks

    def positions(self, segment: Segment) -> float:
        """Positions of a segment on a rank."""
        return segment.padded_length / self.parts

    def _saved(self, plan: Plan, index: int, numbers: StageBytes) -> float:
        segment = plan.segments[index]
        row = numbers.inner if segment.inner else numbers.wave
        row -= self.act * (plan.policy(index) == "recompute_act")
        kept = self.positions(segment) * max(0.0, row) + numbers.span * continued(segment)
        return kept + self._scored(segment, numbers)

    def _scored(self, segment: Segment, numbers: StageBytes) -> float:
        """A context-parallel rank may have all positions that carry loss."""
        return numbers.scored * min(self.positions(segment), segment.num_read)

    def kept(self, plan: Plan, action: Action, stage: int) -> float:
        """Bytes of a segment between its forward and its backward on a stage."""
        segment, policy = plan.segments[action.segment], plan.policy(action.segment)
        if segment.source >= 0:  # another rank computes it
            is_scored = segment.scored and stage == plan.num_stages - 1
            return self.positions(segment) * self.message * is_scored
        received = self.positions(segment) * self.message * (stage > 0)
        if policy == "recompute":
            return received
        if policy == "offload":
            return received + self._scored(segment, self.stages[stage])
        return received + self._saved(plan, action.segment, self.stages[stage])

    def again(self, plan: Plan, action: Action, stage: int) -> float:
        """Bytes that an action makes again, or loads."""
        policy, saved = plan.policy(action.segment), 0.0
        if policy in ("recompute", "offload") and plan.segments[action.segment].source < 0:
            saved = self._saved(plan, action.segment, self.stages[stage])
        if policy == "offload":
            return saved * min(1.0, LAYERS_LOADED / self.layers)
        if policy == "recompute_act":  # a layer at a time
            saved = self.positions(plan.segments[action.segment]) * self.act / self.layers
        return saved * (action.kind == "B")


def continued(segment: Segment) -> int:
    """Spans of a wave that have a parent; what an inner segment keeps of them is in its
    positions."""
    return 0 if segment.inner else sum(span.parent is not None for span in segment.spans)


class Load(NamedTuple):
    """A rank's memory while an action runs; parts as of RankMemory.

    Attributes:
        positions: of the action's segment, which `moment` of the stage is multiplied by.
    """

    action: Action
    kept: float
    cache: float
    moment: float
    held: tuple[tuple[int, float], ...]
    staged: float
    cache_staged: float
    exchanged: float
    positions: float

    @property
    def used(self) -> float:
        return self.kept + self.cache + self.moment


@functools.lru_cache(maxsize=16)
def _of_ranks(plan: Plan, footprint: Footprint) -> tuple[RankMemory, ...]:
    programs = (program_loads(plan, footprint, rank) for rank in range(plan.num_ranks))
    return tuple(_highest([*program]) for program in programs)


def _highest(program: Sequence[Load]) -> RankMemory:
    if not program:
        return RankMemory(0.0, Action("F", 0))
    most = max(program, key=lambda load: load.used)
    return RankMemory(
        most.used, most.action, most.kept, most.cache, most.moment, most.held,
        cache_peak=max(load.cache for load in program),
        cache_staged=max(load.cache_staged for load in program),
        staged=max(load.staged for load in program),
        exchanged=max(load.exchanged for load in program),
    )  # fmt: skip


def program_loads(plan: Plan, footprint: Footprint, rank: int) -> Iterator[Load]:
    """A rank's memory in every action of its program."""
    arenas = [_Arenas(plan, footprint, rank, chunk) for chunk in range(plan.num_chunks)]
    buffers = _message_buffers(plan, footprint, rank, arenas)
    whole = sum(footprint.positions(segment) for segment in plan.segments)
    stages = [footprint.stages[plan.stage(rank, chunk)] for chunk in range(plan.num_chunks)]
    before = whole * max(numbers.before for numbers in stages)
    longest = max(map(footprint.positions, plan.segments), default=0.0)
    messages = MESSAGES * footprint.message * longest if plan.num_ranks > 1 else 0.0
    live: dict[tuple[int, int], float] = {}
    away: dict[tuple[int, int], float] = {}
    for action in plan.programs[rank]:
        stage, key = plan.stage(rank, action.chunk), (action.chunk, action.segment)
        segment, own = plan.segments[action.segment], arenas[action.chunk]
        if action.kind == "F":
            live[key] = footprint.kept(plan, action, stage)
            if plan.policy(action.segment) == "offload":
                saved = footprint._saved(plan, action.segment, footprint.stages[stage])
                away[key] = saved - footprint._scored(segment, footprint.stages[stage])
        own.begin(action)
        positions = footprint.positions(segment) if segment.source < 0 else 0.0
        again = footprint.again(plan, action, stage)
        computing = footprint.stages[stage].moment * positions + own.moment(action)
        posted, exchanged = _held(buffers, action) if buffers else (0.0, 0.0)
        late = min(sum(arena.late for arena in arenas), live[key])
        # Received payloads are in the sidecar before the action computes.
        moment = messages + max(again + computing + exchanged, posted) - late
        yield Load(
            action, before + sum(live.values()), sum(arena.on_device for arena in arenas), moment,
            tuple((index, size) for (_, index), size in live.items()), sum(away.values()),
            sum(arena.on_host for arena in arenas), max(posted, exchanged), positions,
        )  # fmt: skip
        if action.kind == "B":
            live.pop(key)
            away.pop(key, None)
            own.end(action)


def _message_buffers(
    plan: Plan, footprint: Footprint, rank: int, arenas: Sequence[_Arenas]
) -> list[Buffers]:
    make = footprint.buffers
    if make is None:
        return []
    return [make(plan, rank, n, footprint, arena.map.visible) for n, arena in enumerate(arenas)]


def _held(buffers: Sequence[Buffers], action: Action) -> tuple[float, float]:
    """Bytes of buffers before an action waits for its messages, and after."""
    buffers[action.chunk].post(action)
    before = sum(of_chunk.held for of_chunk in buffers)
    buffers[action.chunk].take(action)
    return before, sum(of_chunk.held for of_chunk in buffers)


class _Arenas:
    """Memory of a model chunk's sidecar while a program runs.

    Attributes:
        map: where segments lie.
        late: bytes of gradients that the running action adds layer by layer, while the saved
            tensors of its segment are freed: all but one layer's, for a joined segment.
    """

    def __init__(self, plan: Plan, footprint: Footprint, rank: int, chunk: int) -> None:
        payloads = footprint.payloads[plan.stage(rank, chunk)]
        self.map: PayloadMap = payload_map(
            plan.segments, plan.actions_of(rank, chunk), footprint.parts, footprint.shares,
            [payload.form for payload in payloads],
        )  # fmt: skip
        rows = {payload.form: self.map.rows(payload.form).length for payload in payloads}
        sizes = [(rows[of.form] * of.values, rows[of.form] * of.gradients) for of in payloads]
        away = spread_evenly(len(sizes), footprint.host_layers)
        self._away: Sizes = [sizes[layer] for layer in away]
        self._near: Sizes = [size for layer, size in enumerate(sizes) if layer not in away]
        # Levels are rows of positions; a row of another form may be a state of megabytes.
        read = [payload for payload in payloads if payload.form is Form.POSITIONS]
        self._a_position = max((of.values + of.gradients for of in read), default=0.0)
        self._gathered = max((of.values for of in read), default=0.0)
        self._shares, self._live, self._returned, self.late = footprint.shares, 0, False, 0.0

    @property
    def on_device(self) -> float:
        return self._size(self._near)

    @property
    def on_host(self) -> float:
        return self._size(self._away)

    def _size(self, layers: Sizes) -> float:
        values = sum(values for values, _ in layers) if self._live else 0.0
        return values + (sum(gradients for _, gradients in layers) if self._returned else 0.0)

    def moment(self, action: Action) -> float:
        """Bytes that an action has for its duration: gradients of the ancestors' rows that it reads
        at once, two layers' K/V if these are gathered from other ranks, and layers on the host."""
        visible = [sum(level.keys) * self._shares for level in self.map.levels[action.segment]]
        total = self._a_position * max(visible, default=0)
        total += 2 * self._gathered * sum(visible) * (self._shares > 1)
        if visible or self.map.positions.intervals[action.segment] is not None:
            total += _sum_of_largest((values for values, _ in self._away), LAYERS_VISITED)
            if action.kind == "B":
                total += _sum_of_largest((grads for _, grads in self._away), GRADIENTS_VISITED)
        return total

    def begin(self, action: Action) -> None:
        """Allocates for an action."""
        if action.kind == "F":
            self._live += self.map.positions.intervals[action.segment] is not None
        elif self.map.levels[action.segment]:
            if not (self._returned or self.map.positions.visible[action.segment]):
                gradients = [of_layer for _, of_layer in self._near]
                self.late = sum(gradients) - max(gradients, default=0.0)
            self._returned = True

    def end(self, action: Action) -> None:
        """Frees after a backward."""
        self._live -= self.map.positions.intervals[action.segment] is not None
        self._returned, self.late = self._returned and self._live > 0, 0.0


def _sum_of_largest(sizes: Iterator[float], num: int) -> float:
    return sum(sorted(sizes, reverse=True)[:num])


def spread_evenly(num_layers: int, num_host: int) -> list[int]:
    """Numbers of the layers on the host, evenly spread and including the last."""
    share = min(num_host, num_layers)
    return [
        layer
        for layer in range(num_layers)
        if (layer + 1) * share // num_layers > layer * share // num_layers
    ]


def memory_table(plan: Plan, memory: Sequence[RankMemory]) -> str:
    """A table of what every rank holds at its peak, in GiB."""
    lines = ["rank   peak   kept  K/V, gK/gV  moment  at    segments held"]
    for rank, of_rank in enumerate(memory):
        policies = sorted({plan.policy(index) for index, _ in of_rank.held})
        segments = f"{len(of_rank.held)} ({', '.join(policies)})" if of_rank.held else "none"
        numbers = of_rank.peak, of_rank.kept, of_rank.cache, of_rank.moment
        widths = (6, 6, 11, 7)
        row = " ".join(f"{n / 2**30:.2f}".rjust(w) for n, w in zip(numbers, widths, strict=True))
        lines.append(f"{rank:4d} {row}  {of_rank.action!s:5s} {segments}")
    return "\n".join(lines)
