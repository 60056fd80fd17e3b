"""The life of what spans leave for their children, and the states of recurrent layers.

In an attention layer that is K and V of the span's positions (cache.py). In a recurrent layer it is
the state behind its last position, and the last inputs of a convolution, its tail ("Gated Delta
Networks"; "Transformers are SSMs"). Children send back gradients of either, which are summed in
fp32 or wider. Both are pairs of tensors in an arena, with one life cycle and one account of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_prefix.sidecar.arena import Arena, Both
from megatron_prefix.tree.state_layout import StateMap

if TYPE_CHECKING:
    from megatron_prefix.sidecar.host_arena import HostLayers


class SegmentState(Enum):
    """Life of one inner segment in one layer."""

    EMPTY = "empty"
    CAPTURED = "captured"
    CONSUMED = "consumed"
    FREED = "freed"


class StateCache:
    """What the layers of one model chunk keep for one step; here the states of recurrent layers.

    Args:
        num_layers: layers of any kind that keep something, in the order in which they run.
        states: where the states lie.
        host: layers whose arena is on the host, and on the device only while it is used.

    Attributes:
        states: as given.
        peak_bytes: the most device memory that all of it has taken.
    """

    def __init__(self, num_layers: int, states: StateMap, host: HostLayers | None = None) -> None:
        self.states, self._host = states, host
        self._arenas: dict[int, Arena] = {}
        self._states: dict[tuple[int, int], SegmentState] = {}
        self._live: list[set[int]] = [set() for _ in range(num_layers)]
        self._held = self.peak_bytes = 0

    def state(self, layer: int, index: int) -> SegmentState:
        """State of segment `index` in `layer`."""
        return self._states.get((layer, index), SegmentState.EMPTY)

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device now."""
        return self._held

    def capture_states(self, layer: int, index: int, state: Tensor, tail: Tensor) -> None:
        """Copies what a segment's spans leave in a recurrent layer, [spans, ...] each.

        A second call comes from activation recomputation and changes nothing.
        """
        on_host = self._host is not None and layer in self._host
        made = self._host.state_arena if on_host else StateArena  # type: ignore[union-attr]
        self._capture(made, self.states, layer, index, state, tail)

    def read_states(self, layer: int, index: int, rows: Tensor) -> Both:
        """States and tails that a segment's spans begin with, [spans, ...] each: copies.

        Args:
            layer: its number.
            index: the segment.
            rows: `states.parents` of the segment, int64 on the device.
        """
        arena = self._with(layer, index, self.states.seen[index])
        return arena.read(self.states.seen[index], rows)

    def add_state_gradients(self, layer: int, index: int, rows: Tensor, gradients: Both) -> None:
        """Adds what a segment sends back to rows, all different; the sums are fp32 or wider."""
        arena = self._with(layer, index, self.states.seen[index])
        arena.add(self.states.seen[index], rows, gradients)

    def take_state_gradients(self, layer: int, index: int) -> Both | None:
        """What a segment's descendants have sent, [spans, ...] each; only once. None where nothing
        was sent."""
        return self._consume(layer, index)

    def free(self, index: int, *, consumed: bool) -> None:
        """Releases a segment after its backward; an arena is freed with the last one in it.

        Args:
            index: the segment.
            consumed: whether every layer must have taken the gradients (False for forward_only).
        """
        for layer, live in enumerate(self._live):
            self._expect(layer, index, SegmentState.CONSUMED if consumed else SegmentState.CAPTURED)
            self._states[layer, index] = SegmentState.FREED
            live.discard(index)
            if not live and layer in self._arenas:
                self._arenas.pop(layer).drop()

    def clear(self) -> None:
        """Drops everything in any state: at the end of a step, also of a failed one."""
        for arena in self._arenas.values():
            arena.drop()
        for live in self._live:
            live.clear()
        self._arenas.clear()
        self._states.clear()
        if self._host is not None:
            self._host.clear()

    def _capture(
        self, make: Callable[..., Arena], planned: Any, layer: int, index: int, *both: Tensor
    ) -> None:
        if self.state(layer, index) is SegmentState.CAPTURED:
            return
        self._expect(layer, index, SegmentState.EMPTY)
        if layer not in self._arenas:
            made = make(planned.intervals, planned.length, *both, self._count)
            self._arenas[layer] = made
        self._arenas[layer].write(index, *both)
        self._live[layer].add(index)
        self._states[layer, index] = SegmentState.CAPTURED

    def _consume(self, layer: int, index: int) -> Both | None:
        self._expect(layer, index, SegmentState.CAPTURED)
        self._states[layer, index] = SegmentState.CONSUMED
        self._live[layer].discard(index)
        return self._arenas[layer].sent(index)

    def _count(self, num_bytes: int) -> None:
        self._held += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._held)

    def _with(self, layer: int, index: int, wanted: Iterable[int]) -> Arena:
        """The arena in which these segments are captured and not consumed."""
        closed = [seen for seen in wanted if seen not in self._live[layer]]
        if closed:
            raise RuntimeError(
                f"layer {layer}: segment {index} reads segment {closed[0]}, which is"
                f" {self.state(layer, closed[0]).value}: before its forward or after its backward"
            )
        return self._arenas[layer]

    def _expect(self, layer: int, index: int, wanted: SegmentState) -> None:
        found = self.state(layer, index)
        if found is not wanted:
            raise RuntimeError(
                f"layer {layer}, segment {index}: {found.value}, expected {wanted.value}"
            )


class StateArena(Arena):
    """An arena whose row 0 is the state before any position (tree/state_layout.py)."""

    def _make(self, likes: Iterable[Tensor], sums: bool = False) -> list[Tensor]:
        made = super()._make([*likes], sums)
        with torch.no_grad():
            for whole in made:
                whole[0].zero_()
        return made
