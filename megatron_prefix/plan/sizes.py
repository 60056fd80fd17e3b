"""Bytes of segments and arenas on the stages of a pipeline, by numbers that were measured.  Pure.

memory.py adds them up, action by action.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.plan.actions import Plan
from megatron_prefix.tree import Segment
from megatron_prefix.tree.payload_map import Form
from megatron_prefix.tree.views import Views

if TYPE_CHECKING:
    from megatron_prefix.plan.memory import Footprint

LAYERS_VISITED, GRADIENTS_VISITED = 2, 3
"""With layers on the host, so many of them have K/V, or gK/gV, on the device at once: the one that
runs, the next, and for gK/gV those on their way back (features/host/arena.py)."""
LAYERS_LOADED = 3
"""Layers of an offloaded segment on the device at once (features/host/segment.py)."""


Sizes = Sequence[tuple[float, float]]
"""Per layer the bytes of its payload, and of its gradient."""


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


def place_of(positions: int, longest: int) -> int:
    """Positions of the place that stays for segments about as long: `longest`, a half of it, a
    quarter, and so on."""
    return longest >> max(0, (longest // max(1, positions)).bit_length() - 1)


def spread_evenly(num_layers: int, num_host: int) -> list[int]:
    """Numbers of the layers on the host, evenly spread and including the last."""
    share = min(num_host, num_layers)
    return [
        layer
        for layer in range(num_layers)
        if (layer + 1) * share // num_layers > layer * share // num_layers
    ]


class ArenaSizes:
    """Arenas of K/V and gK/gV, by stage; each is a row a stage, [stages, 1].

    Attributes:
        values, gradients: bytes of the arenas on the device.
        late: of `gradients` all but the largest layer's.
        host_values, host_gradients: bytes of the arenas on the host.
        visited, visited_back: of these the bytes on the device in a forward, and besides in a
            backward.
        a_position: bytes of a position of one layer's K/V and gradients.
        gathered: of its K/V.
    """

    def __init__(self, footprint: Footprint, rows: Sequence[Mapping[Form, int]]) -> None:
        columns = [self._of(footprint, stage, lengths) for stage, lengths in enumerate(rows)]
        (
            self.values, self.gradients, self.late, self.host_values, self.host_gradients,
            self.visited, self.visited_back, self.a_position, self.gathered,
        ) = np.array(columns, np.float64).reshape(-1, 9).T[:, :, None]  # fmt: skip

    @staticmethod
    def _of(footprint: Footprint, stage: int, lengths: Mapping[Form, int]) -> tuple[float, ...]:
        payloads = footprint.payloads[stage]
        sizes = [(lengths[of.form] * of.values, lengths[of.form] * of.gradients) for of in payloads]
        host = spread_evenly(len(sizes), footprint.host_layers)
        away: Sizes = [sizes[layer] for layer in host]
        near: Sizes = [size for layer, size in enumerate(sizes) if layer not in host]
        # Levels are rows of positions; a row of another form may be a state of megabytes.
        read = [payload for payload in payloads if payload.form is Form.POSITIONS]
        near_gradients = [gradients for _, gradients in near]
        return (
            sum(values for values, _ in near), sum(near_gradients),
            sum(near_gradients) - max(near_gradients, default=0.0),
            sum(values for values, _ in away), sum(gradients for _, gradients in away),
            _sum_of_largest((values for values, _ in away), LAYERS_VISITED),
            _sum_of_largest((gradients for _, gradients in away), GRADIENTS_VISITED),
            max((of.values + of.gradients for of in read), default=0.0),
            max((of.values for of in read), default=0.0),
        )  # fmt: skip


def _sum_of_largest(sizes: Iterator[float], num: int) -> float:
    return sum(sorted(sizes, reverse=True)[:num])


def continued(segment: Segment) -> int:
    """Spans of a wave that have a parent; what an inner segment keeps of them is in its
    positions."""
    return 0 if segment.inner else sum(span.parent is not None for span in segment.spans)


class SegmentSizes:
    """What a plan's segments take on the stages: [segments], or [stages, segments].

    Attributes:
        positions: on a rank.
        computed: of these, what the rank computes itself.
        own: whether it computes the segment.
        inner, reads, reads_others: whether others read it, it reads any, or other segments.
        scored_bytes: kept of positions that carry loss.
    """

    def __init__(self, plan: Plan, footprint: Footprint, views: Sequence[Views]) -> None:
        segments, self._footprint = plan.segments, footprint
        self.positions = np.array([s.padded_length / footprint.parts for s in segments], np.float64)
        self.own = np.array([s.source < 0 for s in segments], bool)
        lengths, most = (s.padded_length for s in segments), footprint.pool_length
        places = [place_of(n, most) if footprint.pool and n <= most else 0 for n in lengths]
        self._fits = self.own & (np.array(places, np.int64) > 0)
        self._places = np.array(places, np.float64) / footprint.parts
        self.computed = np.where(self.own, self.positions, 0.0)
        self.inner = np.array([s.inner for s in segments], bool)
        self.reads = np.array([bool(seen.levels) for seen in views], bool)
        self.reads_others = np.array(
            [bool(seen.segments - {index}) for index, seen in enumerate(views)], bool
        )
        numbers = np.array(footprint.stages, np.float64).reshape(-1, len(StageBytes._fields))
        row = StageBytes(*numbers.T[:, :, None])
        self._row = np.where(self.inner, row.inner, row.wave)
        self._spans = row.span * np.array([continued(segment) for segment in segments])
        # A context-parallel rank may have all positions that carry loss.
        read = np.array([segment.num_read for segment in segments], np.float64)
        self.scored_bytes = row.scored * np.minimum(self.positions, read)
        stage = np.arange(len(numbers))[:, None]
        message = self.positions * footprint.message
        self._received = message * (stage > 0)
        scored = np.array([segment.scored for segment in segments], bool)
        self._of_others = message * (scored & (stage == plan.num_stages - 1))

    def saved(self, light: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Bytes that layers save between forward and backward; of `light` segments less."""
        act = self._footprint.act * light
        row = np.maximum(0.0, self._row - act)
        spared = self._spared(act) if self._footprint.placed else row
        placed = self._fits * self.inner * (self._placed(act) - self.positions * spared)
        return self.positions * row + placed + self._spans + self.scored_bytes

    def _spared(self, act: NDArray[Any]) -> NDArray[np.float64]:
        return np.maximum(0.0, self._footprint.spared - act)

    def _placed(self, act: NDArray[Any]) -> NDArray[np.float64]:
        """Bytes of inner segments' own places."""
        return self._places * np.maximum(0.0, (self._footprint.placed or self._row) - act)

    def pooled(self, policy: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bytes that segments keep in the pool, and those of its places that they need; 0 for other
        segments."""
        act = self._footprint.act * (policy == "recompute_act")
        inside = self._fits & np.where(self.inner, policy == "recompute", policy != "offload")
        spared, placed = self._spared(act), self._placed(act)
        if not self._footprint.placed:
            placed = np.minimum(placed, self._places * spared)
        spared = np.where(self.inner, placed, self.positions * spared)
        pool = self._places * np.maximum(0.0, self._footprint.pool - act)
        return inside * spared, inside * pool

    def kept(self, saved: NDArray[np.float64], policy: NDArray[Any]) -> NDArray[np.float64]:
        """Bytes of a segment between its forward and its backward."""
        layers = np.where(policy == "offload", self.scored_bytes, saved)
        own = self._received + np.where(policy == "recompute", 0.0, layers)
        return np.where(self.own, own, self._of_others)

    def again(self, saved: NDArray[np.float64], policy: NDArray[Any]) -> NDArray[np.float64]:
        """Bytes that a backward, or of an offloaded segment any action, makes again or loads."""
        layers = self._footprint.layers
        act = self.positions * self._footprint.act / layers  # a layer at a time
        shares = {"offload": min(1.0, LAYERS_LOADED / layers), "recompute": 1.0}
        again = np.where(policy == "recompute_act", act, 0.0)
        for name, share in shares.items():
            again = np.where(policy == name, self.own * saved * share, again)
        return again
