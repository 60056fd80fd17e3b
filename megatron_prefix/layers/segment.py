"""The segment that runs, as layers know it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.sidecar.cache import SegmentState, SidecarCache

if TYPE_CHECKING:
    from megatron_prefix.layers.blocks.shared import Shared
    from megatron_prefix.parts import StepPart

Saving = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class SegmentContext:
    """What layers need to know about the segment that runs, in its forward or its backward.

    Attributes:
        runs: what its queries on this rank see of its own keys.
        positions: position of every token in its rollout, int64 [padded_length], on the model's
            device.
        backward: whether its backward runs; a forward is then recomputation, from the last layer to
            the first.
        saving: what is around its decoder, which takes what that saves; None: nothing.
        keys_only: the layer of which only its K and V are computed (layers/blocks/unread.py).
        rows: the positions on this rank whose output is read, int64, ascending, the last perhaps
            more than once (`repeats`); None if all are, or the stage is not the last.
        decoded: what the decoder gives, if another rank has computed it: no layer runs then.
        on_decoded: gets what the decoder gives, for other ranks; None if they do not want it.
        between: what one method of a layer leaves for another, by what it is and the layer; None: a
            layer for all of its kind.
        joined: whether spans of it continue others of it (tree/joining.py).
    """

    index: int
    inner: bool
    runs: Runs
    positions: Tensor
    cache: SidecarCache
    backward: bool = False
    saving: Saving | None = None
    parts: Sequence[StepPart] = ()
    keys_only: int | None = None
    rows: Tensor | None = None
    repeats: bool = False
    decoded: Tensor | None = None
    on_decoded: Callable[[Tensor], None] | None = None
    between: dict[tuple[str, int | None], Any] = field(default_factory=dict)
    joined: bool = False

    def capture(self, layer: int, shared: Shared, key: Tensor, value: Tensor) -> None:
        """Puts what an inner segment leaves into the sidecar, once: recomputation calls again."""
        if self.inner and self.cache.state(layer, self.index) is not SegmentState.CAPTURED:
            self.cache.capture(layer, self.index, shared.left(self, key, value))

    def enter(self, layer: int, *, backward: bool) -> None:
        if not self.cache.looks_ahead or (self.joined and not backward):
            return  # nothing comes from elsewhere, or what it reads is not all made yet
        self.cache.prefetch(layer, self.index, backward=backward)
        after = layer - 1 if backward else layer + 1
        if after != self.keys_only:
            self.cache.prefetch(after, self.index, backward=backward)

    def leave(self, layer: int, *, backward: bool) -> None:
        # In recomputation the layer's backward comes next.
        if self.cache.looks_ahead and (backward or not self.backward):
            self.cache.release(layer)
        if backward:
            for part in self.parts:
                part.layer_left()

    @property
    def num_levels(self) -> int:
        return len(self.cache.map.levels[self.index])

    @functools.cached_property
    def level_runs(self) -> tuple[Runs, ...]:
        """What its queries see of each level; made in its first layer, for all of them."""
        levels = (self.cache.level(self.index, number) for number in range(self.num_levels))
        return tuple(Runs(level.query_lengths, level.key_lengths) for level in levels)
