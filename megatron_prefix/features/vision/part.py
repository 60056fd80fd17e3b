"""Images of a step: towers run once an image, rows of embeddings are shared as tokens are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_prefix.device.transfer import to_device
from megatron_prefix.errors import refused
from megatron_prefix.features.vision import models
from megatron_prefix.features.vision.chunk_rows import ChunkRows, chunk_rows
from megatron_prefix.features.vision.tower import TowerOnce
from megatron_prefix.megatron.families import has_mrope
from megatron_prefix.megatron.features import CANNOT_RUN
from megatron_prefix.megatron.install import described
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.refusals.table import ROTARY_TABLES
from megatron_prefix.run.read.model_state import StateOfSteps
from megatron_prefix.run.read.suspend import Capture, running
from megatron_prefix.tree import cp_layout


class Images(StepPart):
    """What the calls of a rank have instead of tokens, and the towers that make it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rank = self.rank
        self.runs_outside = any(map(models.has_images, rank.models, rank.language_models))
        self._rows: list[ChunkRows | None] = [None for _ in rank.models]
        self._towers: list[TowerOnce] = []
        self._is_received: list[bool] = []

    @property
    def counts_calls(self) -> bool:  # type: ignore[override]
        """See StepPart: a tower's rows are kept for a microbatch, whichever call they are for."""
        return self.runs_outside and bool(models.towers(self.rank.models[0]))

    @contextlib.contextmanager
    def around_forward_steps(self, capture: Capture) -> Iterator[None]:
        """See StepPart: towers run once an image, and what they change is their own."""
        with contextlib.ExitStack() as stack:
            for model in self.rank.models if self.runs_outside else ():
                stack.callback(model.register_forward_pre_hook(capture.state.called).remove)
                for tower in models.towers(model):
                    self._towers.append(
                        stack.enter_context(TowerOnce(tower, _image_number).running())
                    )
                    line = models.tower(tower)
                    for module in line.parts(tower) if line is not None else ():
                        stack.enter_context(_owning(capture.state, module))
            yield

    def check_model(self, chunk: int) -> None:
        """See StepPart."""
        model, inner = self.rank.models[chunk], self.rank.language_models[chunk]
        for reason in (*models.refusals(model, inner), *models.rotary_refusals(inner)):
            raise reason.error(CANNOT_RUN)

    def read(self, capture: Capture) -> None:
        """See StepPart."""
        for chunk in range(len(self._rows)):
            self._rows[chunk] = chunk_rows(capture.calls(chunk), self.rank, chunk)

    def tokens(
        self, lengths: Sequence[int], tokens: NDArray[np.int64] | None
    ) -> NDArray[np.int64] | None:
        """See StepPart: numbers of rows."""
        rows = self._rows[0]
        return tokens if rows is None else rows.codes(lengths, tokens)

    def stock(self) -> None:
        """See StepPart."""
        self._rows = [None for _ in self._rows]

    def begin(self, attempt: Attempt) -> None:
        """See StepPart."""
        self._is_received = [segment.source >= 0 for segment in attempt.plan.segments]
        for rows in filter(None, self._rows):
            rows.prepare(attempt.step)
        for tower in self._towers:
            tower.begin()
        for stage in attempt.stages:
            if has_mrope(stage.hooks.model):
                group = stage.hooks.model.pg_collection.cp
                stage.hooks.rotary_slice = functools.partial(_rotary_slice, group)

    def arguments(self, segment: int, chunk: int) -> dict[str, Any]:
        """See StepPart."""
        rows = self._rows[chunk]
        return {} if rows is None else rows.arguments(segment)

    def freed(self, segment: int, chunk: int) -> None:
        """See StepPart: its gradient is there. Of a segment of another rank's, none is ours."""
        rows = self._rows[chunk]
        if rows is not None and not self._is_received[segment]:
            rows.collect(segment)

    def input_backwards(self) -> Sequence[Callable[[], None]]:
        """See StepPart."""
        trained = [rows for rows in self._rows if rows is not None and rows.trains]
        if not trained:
            return ()
        backwards = [rows.backward for rows in trained] + [tower.backward for tower in self._towers]
        return [self._cannot_repeat, *backwards]

    def _cannot_repeat(self) -> None:
        self.why_final = "it was in the backward of embeddings, or of a vision tower"

    def behind(self) -> None:
        """See StepPart: what failed can be undone."""
        self.why_final = ""


def _image_number() -> int:
    """The microbatch whose forward step runs now; -1 outside of all."""
    step = running()
    return -1 if step is None else step.number


def _rotary_slice(group: Any, table: Any, num: int) -> Any:
    """A rotary table [positions, 1, 1, width] that a model has made from a segment's `num`
    positions; of all context-parallel ranks, where it has left the slicing to its caller."""
    if not isinstance(table, Tensor) or len(table) not in (num, num * group.size()):
        raise refused(ROTARY_TABLES, described(table))
    if len(table) == num:
        return table
    slots = cp_layout.rank_positions(len(table), group.rank(), group.size())
    return table.index_select(0, to_device(table.device, slots))


@contextlib.contextmanager
def _owning(state: StateOfSteps, module: nn.Module) -> Iterator[None]:
    """Inside, what a forward of a module changes that a forward step calls is its own."""
    contexts: list[contextlib.AbstractContextManager[None]] = []

    def enter(*_: Any) -> None:
        contexts.append(state.own())
        contexts[-1].__enter__()

    def leave(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    hooks = (
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
