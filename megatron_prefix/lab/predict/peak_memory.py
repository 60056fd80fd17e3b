"""Memory of every rank of a pipeline in one step, predicted from a configuration.  Pure.

Goes through a rank's program action by action. A forward adds what the segment's policy saves. The
first live inner segment adds the arena of K/V, the first backward that reads it that of gK/gV; the
last one frees both. A backward adds for its duration what it recomputes or loads, then frees its
segment. Weights, their gradients and the optimizer are not counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_prefix.lab.predict.footprint import Footprint
from megatron_prefix.lab.predict.kinds import SavedPayload
from megatron_prefix.plan.actions import ON_DEVICE, Action, Plan
from megatron_prefix.plan.memory import MESSAGES, Buffers
from megatron_prefix.plan.sizes import (
    GRADIENTS_VISITED,
    LAYERS_LOADED,
    LAYERS_VISITED,
    Sizes,
    spread_evenly,
)
from megatron_prefix.tree import Segment
from megatron_prefix.tree.payload_map import Level, PayloadMap, length_batches, payload_map


@dataclass(frozen=True)
class PredictedMemory:
    """One rank's peak, in bytes, besides weights and gradients.

    Attributes:
        peak: largest sum.
        saved: largest sum of autograd and sidecar, without temporaries.
        action: at the peak.
        activations, kv, kv_grad, messages, temporary: the parts of `peak`; `temporary` includes
            what the action recomputes or loads.
        cache_peak: largest K/V and gK/gV on the device.
        wave_peak: largest sum while a wave runs (0 without waves).
        staged: largest offloaded segments on the host.
        cache_staged: largest K/V and gK/gV on the host.
        exchanged: largest buffers of further messages (Footprint).
        held: at the peak, (segment, bytes) of segments between forward and backward.
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

    def within(self, room: float) -> PredictedMemory:
        """The peaks with `room` bytes: copies to the host are waited for only when memory is short,
        so offloaded tensors may stay on the device longer."""
        lingering = min(room, self.cache_peak + self.staged) if self.staged else 0.0
        wave = max(self.wave_peak, lingering) if self.wave_peak else 0.0
        return replace(self, peak=max(self.peak, lingering), wave_peak=wave)


@functools.lru_cache(maxsize=16)
def predict_memory(plan: Plan, footprint: Footprint) -> tuple[PredictedMemory, ...]:
    """Of every rank of a plan's pipeline."""
    return tuple(memory for (memory,) in predict_by_policies(plan, footprint, [plan.policies]))


def predict_by_policies(
    plan: Plan, footprint: Footprint, policies: Sequence[tuple[str, ...]]
) -> Iterator[tuple[PredictedMemory, ...]]:
    """Rank by rank, with each of several policies of all segments."""
    runs = [_MemoryRun(replace(plan, policies=names), footprint) for names in policies]
    for rank in range(plan.num_ranks):
        maps = _maps(plan, footprint, rank)
        yield tuple(run.rank(rank, maps) for run in runs)


def _maps(plan: Plan, footprint: Footprint, rank: int) -> list[PayloadMap]:
    """Where payloads lie, per model chunk of a rank; it is the same with all policies."""
    maps = []
    for chunk in range(plan.num_chunks):
        forms = [payload.form for payload in footprint.payloads[plan.stage(rank, chunk)]]
        actions = plan.actions_of(rank, chunk)
        maps.append(payload_map(plan.segments, actions, footprint.parts, footprint.shares, forms))
    return maps


class _MemoryRun:
    """Goes through the programs of a plan's ranks and adds up memory."""

    def __init__(self, plan: Plan, footprint: Footprint) -> None:
        self.plan, self.footprint = plan, footprint
        self.payloads = [Counter(stage) for stage in footprint.payloads]
        # Layers save nothing for segments of other ranks.
        self.positions = [
            segment.padded_length / footprint.parts if segment.source < 0 else 0.0
            for segment in plan.segments
        ]
        self.read = [_scored_share(segment, footprint.parts) for segment in plan.segments]
        message = footprint.stage_input * max(self.positions, default=0.0)
        self.messages = MESSAGES * message if plan.num_ranks > 1 else 0.0

    def rank(self, rank: int, maps: Sequence[PayloadMap]) -> PredictedMemory:
        live: dict[tuple[int, int], float] = {}
        arenas = self._arenas(rank, maps)
        buffers = self._buffers(rank, arenas)
        activations = saved = staged = cache = wave = exchanged = 0.0
        peak = PredictedMemory(0.0, 0.0, Action("F", 0), *(0.0,) * 9, ())
        for action in self.plan.programs[rank]:
            key = action.chunk, action.segment
            if action.kind == "F":
                live[key] = self._kept(rank, action)
                activations += live[key]
            arenas[action.chunk].begin(action)
            kv = sum(arena.values(arena.here) for arena in arenas)
            kv_grad = sum(arena.gradients(arena.here) for arena in arenas)
            staged = max(staged, sum(a.values(a.there) + a.gradients(a.there) for a in arenas))
            reloaded, temporary = self._moment(rank, action, arenas[action.chunk])
            total = activations + kv + kv_grad
            saved, cache = max(saved, total + reloaded), max(cache, kv + kv_grad)
            before, after = _held(buffers, action) if buffers else (0.0, 0.0)
            # Received payloads are in the sidecar before the action computes.
            at_once = max(reloaded + temporary + after, before)
            late = min(sum(arena.late for arena in arenas), live[key])
            used, exchanged = total - late + at_once + self.messages, max(exchanged, before)
            if not self.plan.segments[action.segment].waits:
                wave = max(wave, used)
            if used > peak.peak:
                peak = PredictedMemory(
                    used, 0.0, action, activations, kv, kv_grad - late, self.messages + after,
                    at_once - after, 0.0, 0.0, 0.0, 0.0,
                    tuple((index, size) for (_, index), size in live.items()),
                )  # fmt: skip
            if action.kind == "B":
                activations -= live.pop(key)
                arenas[action.chunk].end(action)
        peak = replace(peak, staged=max(self._staged(rank), default=0.0), cache_staged=staged)
        return replace(peak, saved=saved, wave_peak=wave, exchanged=exchanged, cache_peak=cache)

    def _buffers(self, rank: int, arenas: Sequence[_ArenaMemory]) -> list[Buffers]:
        """Per model chunk of a rank; none without further messages."""
        make = self.footprint.buffers
        if make is None:
            return []
        return [
            make(self.plan, rank, chunk, self.footprint, arena.map.visible)
            for chunk, arena in enumerate(arenas)
        ]

    def _arenas(self, rank: int, maps: Sequence[PayloadMap]) -> list[_ArenaMemory]:
        """The sidecar per model chunk of a rank."""
        payloads = (
            self.footprint.payloads[self.plan.stage(rank, chunk)] for chunk in range(len(maps))
        )
        pairs = zip(maps, payloads, strict=True)
        return [_ArenaMemory(planned, self.footprint, stage) for planned, stage in pairs]

    def _ends(self, rank: int, action: Action) -> tuple[bool, bool]:
        stage = self.plan.stage(rank, action.chunk)
        return stage == 0, stage == self.plan.num_stages - 1

    def _kept(self, rank: int, action: Action) -> float:
        segment, policy = self.plan.segments[action.segment], self.plan.policy(action.segment)
        first, last = self._ends(rank, action)
        if segment.source >= 0:
            states = segment.padded_length / self.footprint.parts * self.footprint.stage_input
            return states * (last and segment.scored)
        row_bytes = self.footprint.kept(
            policy, segment.inner, self.read[action.segment], first, last
        )
        on_device = policy in ON_DEVICE and not self.footprint.checkpointed
        spans = self._of_spans(rank, action) if on_device else 0.0
        return self.positions[action.segment] * row_bytes + spans

    def _of_spans(self, rank: int, action: Action) -> float:
        """Bytes saved per span by the layers of a stage, or by the largest if layers are recomputed
        one by one."""
        payloads = self.payloads[self.plan.stage(rank, action.chunk)]
        if not any(of.initial or of.edge or of.batched for of in payloads):
            return 0.0
        footprint, spans = self.footprint, self.plan.segments[action.segment].spans
        with_parents, lengths = sum(s.parent is not None for s in spans), [s.padded for s in spans]
        rows = sum(len(batch) * max(lengths[i] for i in batch) for batch in length_batches(lengths))
        padding = (rows - sum(lengths)) / footprint.parts
        layers = {
            of: of.initial * with_parents + of.edge * len(spans) + of.batched * padding
            for of in payloads
        }
        if footprint.checkpointed:
            return max(layers.values())
        return sum(count * layers[of] for of, count in payloads.items())

    def _staged(self, rank: int) -> Iterator[float]:
        """Bytes on the host after every action of an offloaded segment."""
        staged = 0.0
        for action in self.plan.programs[rank]:
            segment = self.plan.segments[action.segment]
            if self.plan.policy(action.segment) == "offload":
                ends = (segment.inner, self.read[action.segment], *self._ends(rank, action))
                away = self.footprint.kept("retain", *ends) - self.footprint.kept("offload", *ends)
                sign = 1 if action.kind == "F" else -1
                away *= self.positions[action.segment]
                spans = 0.0 if self.footprint.checkpointed else self._of_spans(rank, action)
                staged += sign * (away + spans)
                yield staged

    def _moment(self, rank: int, action: Action, arena: _ArenaMemory) -> tuple[float, float]:
        """Transient bytes of an action: saved tensors that it makes again, and temporaries."""
        segment, policy = self.plan.segments[action.segment], self.plan.policy(action.segment)
        _, last = self._ends(rank, action)
        positions, footprint = self.positions[action.segment], self.footprint
        if segment.source >= 0:
            return 0.0, self._arriving(action, last and segment.scored)
        on_device = action.kind == "F" and policy in ON_DEVICE
        layer = footprint.computed(policy, segment.inner) if on_device else footprint.temporary
        temporary = positions * max(layer, footprint.exchanged(action.kind == "B"))
        temporary += max(
            self._of_ancestors(arena.map.levels[action.segment]),
            footprint.tail
            * max(
                (reads[action.segment].repeated for _, reads in arena.map.tails.values()), default=0
            ),
        )
        if segment.inner or arena.map.levels[action.segment]:
            temporary += arena.visited(action.kind == "B")
        read = self.read[action.segment]
        if last and action.kind == "B":  # the head runs backward before the layers
            unused = footprint.unread * (policy != "offload")  # that is on the host until then
            temporary -= positions * (footprint.released(read) if segment.scored else unused)
        head = 0.0
        if last and segment.scored:
            head = positions * read * footprint.head_temporary + footprint.head_weight * (
                action.kind == "B"
            )
        temporary = max(head, temporary)
        return self._again(rank, action), temporary

    def _again(self, rank: int, action: Action) -> float:
        """Bytes of saved tensors that an action recomputes or loads."""
        segment, policy = self.plan.segments[action.segment], self.plan.policy(action.segment)
        first, last = self._ends(rank, action)
        positions, read, footprint = (
            self.positions[action.segment],
            self.read[action.segment],
            self.footprint,
        )
        row_bytes = 0.0
        if policy == "offload":
            layer = footprint.inner if segment.inner else footprint.wave
            row_bytes = min(LAYERS_LOADED, footprint.num_layers) * layer
        if action.kind != "B":
            return positions * row_bytes
        # What follows the last layer has been released when the layers run backward.
        after = footprint.released(read) if last else 0.0
        act = footprint.act if policy == "recompute_act" else 0.0
        row_bytes += max(0.0, footprint.again + act - after)
        recomputed = policy == "recompute"
        spans = self._of_spans(rank, action) if recomputed or footprint.checkpointed else 0.0
        if recomputed:
            saved = footprint.kept("retain", segment.inner, read, first, last)
            row_bytes += saved - (0.0 if first else footprint.stage_input)
        return positions * row_bytes + spans

    def _arriving(self, action: Action, scored: bool) -> float:
        """Transient bytes of a received segment: those of the output layer if it is scored."""
        segment = self.plan.segments[action.segment]
        positions, read = segment.padded_length / self.footprint.parts, self.read[action.segment]
        head = positions * read * self.footprint.head_temporary * scored
        if action.kind == "B":
            saved = positions * read * (self.footprint.head - self.footprint.norm)
            return head + (saved + self.footprint.head_weight) * scored
        return head

    def _of_ancestors(self, levels: Sequence[Level]) -> float:
        """Transient bytes of one layer's attention to ancestors."""
        footprint = self.footprint
        visible = [sum(level.keys) * footprint.shares for level in levels]
        copied = [n for n, level in zip(visible, levels, strict=True) if level.rows is None]
        total = footprint.seen * max(visible, default=0) + footprint.kv * max(copied, default=0)
        # Of two layers K/V of ancestors are gathered from the context-parallel ranks.
        return total + (2 * footprint.kv * sum(visible) if footprint.shares > 1 else 0.0)


def _held(buffers: Sequence[Buffers], action: Action) -> tuple[float, float]:
    """Bytes of buffers before an action waits for its messages, and after."""
    buffers[action.chunk].post(action)
    before = sum(of_chunk.held for of_chunk in buffers)
    buffers[action.chunk].take(action)
    return before, sum(of_chunk.held for of_chunk in buffers)


def _scored_share(segment: Segment, parts: int) -> float:
    """Largest share of positions with loss on a context-parallel rank; one may hold all of them."""
    return min(1.0, parts * segment.num_read / segment.padded_length)


class _ArenaMemory:
    """Memory of a model chunk's sidecar while a program runs.

    Attributes:
        map: where segments lie.
        here, there: sizes of the layers on the device, and on the host.
        live: inner segments between forward and backward.
        returned: whether the arenas of gradients exist.
        late: bytes of gradients that the running action adds layer by layer, while the saved
            tensors of its segment are freed: all but one layer's, for a joined segment.
    """

    def __init__(
        self, planned: PayloadMap, footprint: Footprint, payloads: Sequence[SavedPayload]
    ) -> None:
        rows = {payload.form: planned.rows(payload.form).length for payload in payloads}
        sizes = [
            (rows[payload.form] * payload.values, rows[payload.form] * payload.gradients)
            for payload in payloads
        ]
        on_host = spread_evenly(len(sizes), footprint.host_layers)
        self.there = [sizes[layer] for layer in on_host]
        self.here = [size for layer, size in enumerate(sizes) if layer not in on_host]
        self.map, self.live, self.returned, self.late = planned, 0, False, 0.0

    def values(self, layers: Sizes) -> float:
        """Bytes of payloads of `layers`."""
        return sum(values for values, _ in layers) if self.live else 0.0

    def gradients(self, layers: Sizes) -> float:
        """Bytes of gradients of `layers`."""
        return sum(gradients for _, gradients in layers) if self.returned else 0.0

    def visited(self, backward: bool) -> float:
        """Bytes on the device of layers on the host while an action runs."""
        values = sorted((values for values, _ in self.there), reverse=True)
        gradients = sorted((gradients for _, gradients in self.there), reverse=True)
        total = sum(values[:LAYERS_VISITED])
        return total + (sum(gradients[:GRADIENTS_VISITED]) if backward else 0.0)

    def begin(self, action: Action) -> None:
        """Allocates for an action."""
        if action.kind == "F":
            self.live += self.map.positions.intervals[action.segment] is not None
        elif self.map.levels[action.segment]:
            if not (self.returned or self.map.positions.visible[action.segment]):
                gradients = [of_layer for _, of_layer in self.here]
                self.late = sum(gradients) - max(gradients, default=0.0)
            self.returned = True

    def end(self, action: Action) -> None:
        """Frees after a backward."""
        self.live -= self.map.positions.intervals[action.segment] is not None
        self.returned, self.late = self.returned and self.live > 0, 0.0
