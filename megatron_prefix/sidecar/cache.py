"""The sidecar: K/V of inner segments and the gradients that their descendants send back.

K and V are the forward cache, gK and gV the backward cache ("Schedule-Level Shared-Prefix Reuse for
LLM RL Training", sections 3.3 and 4.1). It belongs to a step, not to the model, so it is in no
checkpoint. Every change of state is checked: a read before the capture, a second consumption or a
capture after release is an error instead of wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import on
from megatron_prefix.sidecar.arena import Arena, Both, Rows
from megatron_prefix.sidecar.states import SegmentState, StateCache
from megatron_prefix.tree.kv_layout import ArenaMap, one_interval

if TYPE_CHECKING:
    from megatron_prefix.sidecar.host_arena import HostLayers


class LevelRows(NamedTuple):
    """What a segment sees in one level (megatron_prefix/tree/kv_layout.py).

    Attributes:
        query_lengths: queries of every run, on this rank.
        key_lengths: keys of every run, of all ranks.
        queries: the queries among the segment's positions on this rank.
        keys: this rank's rows in the arena, run after run.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    queries: Rows
    keys: Rows


class OwnKeys:
    """A segment's own K and V in one call of attention, and their gradients.

    Args:
        key, value: [positions, kv_heads, dim].
        sent: takes what the segment's descendants have sent; None where it has none.
    """

    def __init__(
        self, key: Tensor, value: Tensor, sent: Callable[[], Both | None] | None = None
    ) -> None:
        self._both, self._sent = (key, value), sent

    def runs(self) -> Both:
        """K and V of this rank's own runs (`cp_layout.own_runs`), run after run."""
        return self._both

    def send(self, gradients: Both) -> None:
        """Gives the gradients of `runs` to the keys and values."""
        self._both = gradients

    def take(self) -> Both:
        """The gradients of this rank's K and V, those of descendants included; after `send`."""
        mine, sent = self._both, self._sent() if self._sent is not None else None
        return mine if sent is None else (sent[0] + mine[0], sent[1] + mine[1])


class SidecarCache(StateCache):
    """K/V and gK/gV of one model chunk for one step, and the states of its recurrent layers.

    Args:
        planned: where they lie; of this rank's part of every segment.
        num_layers: layers of the model chunk with attention or a recurrence, in the order in which
            they run.
        host: layers whose arena is on the host, and on the device only while it is used.
        recurrent: numbers of the recurrent ones.

    Attributes:
        map: `planned`.
        peak_bytes: the most device memory that all of it has taken.
    """

    def __init__(
        self,
        planned: ArenaMap,
        num_layers: int,
        host: HostLayers | None = None,
        recurrent: Collection[int] = (),
    ) -> None:
        super().__init__(num_layers, planned.states, host)
        self.map = planned
        self._attention = {*range(num_layers)}.difference(recurrent)
        self._levels: dict[tuple[int, int], LevelRows] = {}

    def capture(self, layer: int, index: int, key: Tensor, value: Tensor) -> None:
        """Copies a segment's K [positions, kv_heads, dim] and V [positions, kv_heads, value_dim]
        into its layer's arena.

        They are copied because Megatron frees the storage of K and V under some recompute and
        offload options. A second call comes from activation recomputation and changes nothing.
        """
        made = self._host.arena if self._host is not None and layer in self._host else Arena
        self._capture(made, self.map, layer, index, key, value)

    def own(self, layer: int, index: int) -> Both:
        """K and V of the segment itself, views."""
        self._expect(layer, index, SegmentState.CAPTURED)
        rows = self.map.intervals[index]
        if rows is None:
            raise RuntimeError(f"segment {index} is a wave: it has no K/V here")
        return self._arenas[layer].read((index,), rows)

    def own_keys(self, layer: int, index: int, inner: bool, key: Tensor, value: Tensor) -> OwnKeys:
        """A segment's own K and V for one call of its attention, captured if it is inner.

        Args:
            layer: local index.
            index: the segment.
            inner: whether others read it; what is captured is then used, not `key` and `value`.
            key, value: this rank's, [positions, kv_heads, dim].
        """
        if not inner:
            return OwnKeys(key, value)
        self.capture(layer, index, key, value)
        return OwnKeys(*self.own(layer, index), lambda: self.take_gradient(layer, index))

    def prefetch(self, layer: int, index: int, *, backward: bool = False) -> None:
        """Announces that a segment will run in a layer.

        Args:
            layer: local index; it may be out of range.
            index: the segment.
            backward: whether gradients are needed, too; layers then run from the last to the first.
        """
        if self._host is None or (near := self._host.near(layer, backward)) is None:
            return
        if near not in self._arenas:
            return
        own = (index,) if self.state(near, index) is SegmentState.CAPTURED else ()
        if near in self._attention:
            wanted = (*self.map.seen[index], *own)
            self._arenas[near].fetch(wanted, wanted if backward else ())
        elif backward:  # autograd has the states; a forward that runs again reads them by itself
            self._arenas[near].fetch((), (*self.states.seen[index], *own))
        else:
            self._arenas[near].fetch(self.states.seen[index])

    def release(self, layer: int) -> None:
        """Tells that a segment is done in a layer."""
        if self._host is not None and layer in self._host and layer in self._arenas:
            self._arenas[layer].leave()

    def read(self, layer: int, index: int, number: int) -> Both:
        """K and V of a segment's level, run after run: views, or copies where its runs' rows are
        not one interval."""
        return self._open(layer, index).read(self.map.seen[index], self.level(index, number).keys)

    def add_gradient(
        self, layer: int, index: int, number: int, key_grad: Tensor, value_grad: Tensor
    ) -> None:
        """Adds what a segment sends to the keys of a level (shapes of `read`), in fp32 or wider."""
        self._open(layer, index).add(
            self.map.seen[index], self.level(index, number).keys, (key_grad, value_grad)
        )

    def take_gradient(self, layer: int, index: int) -> Both | None:
        """The accumulated gK, gV of a segment; only once. None where nothing was sent."""
        return self._consume(layer, index)

    def clear(self) -> None:
        """Drops everything in any state: at the end of a step, also of a failed one."""
        super().clear()
        self._levels.clear()

    def _open(self, layer: int, index: int) -> Arena:
        """The arena in which all that a segment sees is captured and not consumed."""
        return self._with(layer, index, self.map.seen[index])

    def level(self, index: int, number: int) -> LevelRows:
        """A segment's level as a kernel's call needs it; made once a step."""
        found = self._levels.get((index, number))
        if found is None:
            level, parts = self.map.levels[index][number], self.map.shares
            device = next(iter(self._arenas.values())).device
            found = LevelRows(
                level.queries, tuple(num * parts for num in level.keys),
                _rows(device, [(run.first, run.stop) for run in level.runs]),
                _rows(device, [(run.start, run.end) for run in level.runs]),
            )  # fmt: skip
            self._levels[index, number] = found
        return found


def _rows(device: torch.device, intervals: Sequence[tuple[int, int]]) -> Rows:
    """Intervals one after another: one interval if they are neighbours, else an index."""
    whole = one_interval(intervals)
    if whole is not None:
        return whole
    return on(device, np.concatenate([np.arange(*interval) for interval in intervals]))
