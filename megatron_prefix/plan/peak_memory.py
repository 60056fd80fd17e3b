"""Predicted memory of every rank of a pipeline in one step.  Pure.

Goes through a rank's program action by action. A forward adds what the segment's policy keeps. The
first inner segment that is live adds the arena of K/V, the first backward that reads it that of
gK/gV, and both go with the last one. A backward adds for its duration what it recomputes or loads,
and then releases its segment. Weights, their gradients and the optimizer are not counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_prefix.plan.actions import ON_DEVICE, Action, Plan
from megatron_prefix.plan.exchange_memory import ExchangeMemory
from megatron_prefix.plan.footprint import Footprint, spread
from megatron_prefix.plan.layer_numbers import Payload
from megatron_prefix.tree import Segment
from megatron_prefix.tree.payload_map import Level, PayloadMap, batches, payload_map

Sizes = list[tuple[float, float]]
"""Of some layers the bytes of their payload, and of its gradient."""

MESSAGES = 4
"""Receives posted ahead and sends under way, both directions together (run/execute/messages.py)."""
LAYERS_VISITED, GRADIENTS_VISITED = 2, 3
"""With layers on the host, so many of them have K/V, or gK/gV, on the device at once: the one that
runs, the next, and for gK/gV those on their way back (megatron_prefix/sidecar/host_arena.py)."""
LAYERS_LOADED = 3
"""Layers of an offloaded segment on the device at once (megatron_prefix/offload/segment.py)."""


@dataclass(frozen=True)
class RankMemory:
    """One rank's peak, in bytes, besides weights and gradients.

    Attributes:
        peak: the most that is in use at once.
        saved: the most that autograd and the sidecar hold at once, without temporaries.
        action: the one that runs at the peak.
        activations, kv, kv_grad, messages, temporary: the parts of `peak`; `temporary` includes
            what the action recomputes or loads.
        cache_peak: the most that K/V and gK/gV take on the device.
        wave_peak: the most in use while a wave runs (0 without waves).
        staged: the most that offloaded segments take on the host.
        cache_staged: the most that K/V and gK/gV take on the host.
        exchanged: the most that messages between data-parallel ranks take.
        held: at the peak, the segments between forward and backward and the bytes of each.
    """

    peak: float
    saved: float
    action: Action
    activations: float
    kv: float
    kv_grad: float
    messages: float
    temporary: float
    cache_peak: float
    wave_peak: float
    staged: float
    cache_staged: float
    held: tuple[tuple[int, float], ...]
    exchanged: float = 0.0

    def within(self, room: float) -> RankMemory:
        """The peaks where `room` bytes may be used: copies to the host are not waited for before
        memory is short, so offloaded tensors may stay on the device longer."""
        lingering = min(room, self.cache_peak + self.staged) if self.staged else 0.0
        wave = max(self.wave_peak, lingering) if self.wave_peak else 0.0
        return replace(self, peak=max(self.peak, lingering), wave_peak=wave)


@functools.lru_cache(maxsize=16)
def predict(plan: Plan, footprint: Footprint) -> tuple[RankMemory, ...]:
    """The memory of every rank of a plan's pipeline."""
    run = _MemoryRun(plan, footprint)
    return tuple(run.rank(rank) for rank in range(plan.num_ranks))


def table(plan: Plan, memory: Sequence[RankMemory]) -> str:
    """A table of what every rank holds at its peak, in GiB."""
    lines = ["rank   peak  activations    K/V  gK/gV  temporary  at    segments held"]
    for rank, one in enumerate(memory):
        policies = sorted({plan.policy(index) for index, _ in one.held})
        held = f"{len(one.held)} ({', '.join(policies)})" if one.held else "none"
        numbers = (one.peak, one.activations, one.kv, one.kv_grad, one.temporary)
        cells = (f"{number / 2**30:.2f}" for number in numbers)
        widths = (6, 12, 6, 6, 10)
        row = " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{rank:4d} {row}  {one.action!s:5s} {held}")
    return "\n".join(lines)


class _MemoryRun:
    """Goes through the programs of a plan's ranks and adds up memory."""

    def __init__(self, plan: Plan, footprint: Footprint) -> None:
        self.plan, self.one = plan, footprint
        self.payloads = [Counter(stage) for stage in footprint.payloads]
        # Of what another rank computes no layer saves anything here.
        self.positions = [
            segment.padded_length / footprint.parts if segment.source < 0 else 0.0
            for segment in plan.segments
        ]
        self.read = [_read(segment, footprint.parts) for segment in plan.segments]
        message = footprint.stage_input * max(self.positions, default=0.0)
        self.messages = MESSAGES * message if plan.num_ranks > 1 else 0.0

    def rank(self, rank: int) -> RankMemory:
        """Goes through one rank's program."""
        held: dict[tuple[int, int], float] = {}
        arenas = self._arenas(rank)
        messages = self._exchanges(rank, arenas)
        activations = self._held_by_places(rank)
        saved = there = kept = wave = exchanged = 0.0
        found = RankMemory(0.0, 0.0, Action("F", 0), *(0.0,) * 9, ())
        for action in self.plan.programs[rank]:
            key = action.chunk, action.segment
            if action.kind == "F":
                held[key] = self._kept(rank, action) - self._kept_in_places(rank, action)
                activations += held[key]
            arenas[action.chunk].begin(action)
            kv = sum(arena.values(arena.here) for arena in arenas)
            kv_grad = sum(arena.gradients(arena.here) for arena in arenas)
            there = max(there, sum(a.values(a.there) + a.gradients(a.there) for a in arenas))
            again, temporary = self._moment(rank, action, arenas[action.chunk])
            total = activations + kv + kv_grad
            saved, kept = max(saved, total + again), max(kept, kv + kv_grad)
            messages[action.chunk].post(action)
            before = sum(one.held for one in messages)
            messages[action.chunk].take(action)
            crossing = sum(one.held for one in messages)
            # What has arrived is in the sidecar before the action computes.
            at_once = max(again + temporary + crossing, before)
            late = min(sum(arena.late for arena in arenas), held[key])
            used, exchanged = total - late + at_once + self.messages, max(exchanged, before)
            if not self.plan.segments[action.segment].waits:
                wave = max(wave, used)
            if used > found.peak:
                found = RankMemory(
                    used, 0.0, action, activations, kv, kv_grad - late, self.messages + crossing,
                    at_once - crossing, 0.0, 0.0, 0.0, 0.0,
                    tuple((index, size) for (_, index), size in held.items()),
                )  # fmt: skip
            if action.kind == "B":
                activations -= held.pop(key)
                arenas[action.chunk].end(action)
        found = replace(found, staged=max(self._staged(rank), default=0.0), cache_staged=there)
        return replace(found, saved=saved, wave_peak=wave, exchanged=exchanged, cache_peak=kept)

    def _held_by_places(self, rank: int) -> float:
        """Bytes of places that layers save in."""
        places = self.one.places
        return 0.0 if places is None else places.held(self.plan, self.one, rank)

    def _kept_in_places(self, rank: int, action: Action) -> float:
        """Of what a segment keeps, bytes in places of their own."""
        again = self.plan.policy(action.segment) == "recompute"
        return 0.0 if again else self._in_places(rank, action)

    def _in_places(self, rank: int, action: Action) -> float:
        """Of what a segment's layers save, bytes in places of their own."""
        places = self.one.places
        return 0.0 if places is None else places.saved(self.plan, self.one, rank, action)

    def _exchanges(self, rank: int, arenas: Sequence[_Arena]) -> list[ExchangeMemory]:
        """Messages between data-parallel ranks, of every model chunk of a rank."""
        return [
            ExchangeMemory(self.plan, rank, chunk, self.one, arena.map.seen)
            for chunk, arena in enumerate(arenas)
        ]

    def _arenas(self, rank: int) -> list[_Arena]:
        """The sidecar of every model chunk of a rank."""
        plan, one = self.plan, self.one
        found = []
        for chunk in range(plan.num_chunks):
            payloads, actions = one.payloads[plan.stage(rank, chunk)], plan.actions_of(rank, chunk)
            forms = [payload.form for payload in payloads]
            planned = payload_map(plan.segments, actions, one.parts, one.shares, forms)
            found.append(_Arena(planned, one, payloads))
        return found

    def _ends(self, rank: int, action: Action) -> tuple[bool, bool]:
        stage = self.plan.stage(rank, action.chunk)
        return stage == 0, stage == self.plan.num_stages - 1

    def _kept(self, rank: int, action: Action) -> float:
        segment, policy = self.plan.segments[action.segment], self.plan.policy(action.segment)
        first, last = self._ends(rank, action)
        if segment.source >= 0:
            states = segment.padded_length / self.one.parts * self.one.stage_input
            return states * (last and segment.scored)
        one = self.one.kept(policy, segment.inner, self.read[action.segment], first, last)
        kept = policy in ON_DEVICE and not self.one.checkpointed
        spans = self._of_spans(rank, action) if kept else 0.0
        return self.positions[action.segment] * one + spans

    def _of_spans(self, rank: int, action: Action) -> float:
        """Bytes that layers save for the spans of a segment: all of a stage, or where each is
        recomputed alone the one with most."""
        payloads = self.payloads[self.plan.stage(rank, action.chunk)]
        if not any(of.initial or of.edge or of.batched for of in payloads):
            return 0.0
        one, spans = self.one, self.plan.segments[action.segment].spans
        with_parents, lengths = sum(s.parent is not None for s in spans), [s.padded for s in spans]
        rows = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches(lengths))
        padding = (rows - sum(lengths)) / one.parts
        layers = {
            of: of.initial * with_parents + of.edge * len(spans) + of.batched * padding
            for of in payloads
        }
        if one.checkpointed:
            return max(layers.values())
        return sum(count * layers[of] for of, count in payloads.items())

    def _staged(self, rank: int) -> Iterator[float]:
        """Bytes on the host after every action of an offloaded segment."""
        staged = 0.0
        for action in self.plan.programs[rank]:
            segment = self.plan.segments[action.segment]
            if self.plan.policy(action.segment) == "offload":
                ends = (segment.inner, self.read[action.segment], *self._ends(rank, action))
                away = self.one.kept("retain", *ends) - self.one.kept("offload", *ends)
                sign = 1 if action.kind == "F" else -1
                away *= self.positions[action.segment]
                spans = 0.0 if self.one.checkpointed else self._of_spans(rank, action)
                staged += sign * (away + spans)
                yield staged

    def _moment(self, rank: int, action: Action, arena: _Arena) -> tuple[float, float]:
        """Bytes in use only while an action runs: saved ones, and temporaries."""
        segment, policy = self.plan.segments[action.segment], self.plan.policy(action.segment)
        _, last = self._ends(rank, action)
        positions, one = self.positions[action.segment], self.one
        if segment.source >= 0:
            return 0.0, self._arriving(action, last and segment.scored)
        kept = action.kind == "F" and policy in ON_DEVICE
        layer = one.computed(policy, segment.inner) if kept else one.temporary
        temporary = positions * max(layer, one.exchanged(action.kind == "B"))
        temporary += max(
            self._of_ancestors(arena.map.levels[action.segment]),
            one.tail
            * max(
                (reads[action.segment].repeated for _, reads in arena.map.tails.values()), default=0
            ),
        )
        if segment.inner or arena.map.levels[action.segment]:
            temporary += arena.visited(action.kind == "B")
        read = self.read[action.segment]
        if last and action.kind == "B":  # what is behind the layers runs backward before them
            unread = one.unread * (policy != "offload")  # that is on the host until then
            temporary -= positions * (one.released(read) if segment.scored else unread)
        head = 0.0
        if last and segment.scored:
            head = positions * read * one.head_temporary + one.head_weight * (action.kind == "B")
        temporary = max(head, temporary)
        return self._again(rank, action), temporary

    def _again(self, rank: int, action: Action) -> float:
        """Bytes that layers save while an action runs: of what is computed or loaded once more."""
        segment, policy = self.plan.segments[action.segment], self.plan.policy(action.segment)
        first, last = self._ends(rank, action)
        positions, read, one = self.positions[action.segment], self.read[action.segment], self.one
        again = 0.0
        if policy == "offload":
            layer = one.inner if segment.inner else one.wave
            again = min(LAYERS_LOADED, one.num_layers) * layer
        if action.kind != "B":
            return positions * again
        # What follows the last layer has been released when the layers run backward.
        after = one.released(read) if last else 0.0
        act = one.act if policy == "recompute_act" else 0.0
        again += max(0.0, one.again + act - after)
        recomputed = policy == "recompute"
        spans = self._of_spans(rank, action) if recomputed or one.checkpointed else 0.0
        if recomputed:
            whole = one.kept("retain", segment.inner, read, first, last)
            again += whole - (0.0 if first else one.stage_input)
            spans -= self._in_places(rank, action)
        return positions * again + spans

    def _arriving(self, action: Action, scored: bool) -> float:
        """Transient bytes of a segment of another rank: what the output layer needs where it is
        scored."""
        segment = self.plan.segments[action.segment]
        positions, read = segment.padded_length / self.one.parts, self.read[action.segment]
        head = positions * read * self.one.head_temporary * scored
        if action.kind == "B":
            saved = positions * read * (self.one.head - self.one.norm)
            return head + (saved + self.one.head_weight) * scored
        return head

    def _of_ancestors(self, levels: Sequence[Level]) -> float:
        """Transient bytes of one layer's attention to ancestors."""
        one = self.one
        seen = [sum(level.keys) * one.shares for level in levels]
        copied = [n for n, level in zip(seen, levels, strict=True) if level.rows is None]
        found = one.seen * max(seen, default=0) + one.kv * max(copied, default=0)
        # Of two layers K/V of ancestors are gathered from the context-parallel ranks.
        return found + (2 * one.kv * sum(seen) if one.shares > 1 else 0.0)


def _read(segment: Segment, parts: int) -> float:
    """Share of a segment's positions that carry loss, on the context-parallel rank with most: those
    at the end of a span may all be on one."""
    return min(1.0, parts * segment.num_read / segment.padded_length)


class _Arena:
    """How much of a model chunk's sidecar is in use while a program runs.

    Attributes:
        map: where segments lie.
        here, there: of the layers on the device, on the host.
        live: inner segments between forward and backward.
        returned: whether gradients have come back.
        late: bytes of those that come in the action that runs, layer by layer, as what its segment
            has saved goes: all but one layer's, where it sends to spans of its own first.
    """

    def __init__(
        self, planned: PayloadMap, footprint: Footprint, payloads: Sequence[Payload]
    ) -> None:
        rows = {one.form: planned.rows(one.form).length for one in payloads}
        sizes = [(rows[one.form] * one.values, rows[one.form] * one.gradients) for one in payloads]
        on_host = spread(len(sizes), footprint.host_layers)
        self.there = [sizes[layer] for layer in on_host]
        self.here = [size for layer, size in enumerate(sizes) if layer not in on_host]
        self.map, self.live, self.returned, self.late = planned, 0, False, 0.0

    def values(self, layers: Sizes) -> float:
        """Bytes of payloads of some layers."""
        return sum(values for values, _ in layers) if self.live else 0.0

    def gradients(self, layers: Sizes) -> float:
        """Bytes of their gradients."""
        return sum(gradients for _, gradients in layers) if self.returned else 0.0

    def visited(self, backward: bool) -> float:
        """Bytes on the device of layers on the host while an action runs."""
        values = sorted((values for values, _ in self.there), reverse=True)
        gradients = sorted((gradients for _, gradients in self.there), reverse=True)
        found = sum(values[:LAYERS_VISITED])
        return found + (sum(gradients[:GRADIENTS_VISITED]) if backward else 0.0)

    def begin(self, action: Action) -> None:
        """Takes what an action needs."""
        if action.kind == "F":
            self.live += self.map.positions.intervals[action.segment] is not None
        elif self.map.levels[action.segment]:
            if not (self.returned or self.map.positions.seen[action.segment]):
                gradients = [of_layer for _, of_layer in self.here]
                self.late = sum(gradients) - max(gradients, default=0.0)
            self.returned = True

    def end(self, action: Action) -> None:
        """Gives it back after a backward."""
        self.live -= self.map.positions.intervals[action.segment] is not None
        self.returned, self.late = self.returned and self.live > 0, 0.0


# What was seen -----------------------------------------------------------------------------------


class Peaks(NamedTuple):
    """What the allocator of a device says, in bytes.

    Attributes:
        used: allocated now.
        allocated, reserved: the most so far.
    """

    used: float
    allocated: float
    reserved: float


class Seen(NamedTuple):
    """Peaks of a schedule's steps over the predicted ones, besides what was there before a step;
    0 where none was seen.

    Attributes:
        allocated: by tensors.
        reserved: by the allocator.
    """

    allocated: float = 0.0
    reserved: float = 0.0

    @classmethod
    def of_step(cls, before: Peaks, after: Peaks, predicted: float) -> Seen:
        """Of one step. Nobody resets the counters, so only a new maximum tells.

        Args:
            before, after: the step.
            predicted: bytes besides weights and gradients; 0: nothing was.
        """
        if not predicted:
            return cls()
        pairs = (before.allocated, after.allocated), (before.reserved, after.reserved)
        return cls(*((new - before.used) / predicted * (new > old) for old, new in pairs))

    @classmethod
    def most(cls, several: Iterable[Seen]) -> Seen:
        """Of the rank that has most of each."""
        return cls(*map(max, zip(*several, strict=True)))

    def then(self, later: Seen) -> Seen:
        """With a later step's."""
        return Seen(*(new or old for old, new in zip(self, later, strict=True)))


def factors(stock: Seen, ours: Seen) -> tuple[float, float]:
    """By what predictions are multiplied, of the stock schedule and of ours.

    What is wrong with the prediction of one is thought to be wrong with that of the other until
    that was seen, too. Where our steps reserve more of the device than they allocate, compared
    with the stock schedule, that counts as if it were allocated.
    """
    by_stock = stock.allocated or ours.allocated or 1.0
    by_ours = ours.allocated or by_stock
    if stock.reserved and ours.reserved:
        by_ours = max(by_ours, by_stock * ours.reserved / stock.reserved)
    return by_stock, by_ours
