"""Choices of an indexer that replay: queues of what the indexers of a sampler chose, as in miles.

Every layer that chooses has an entry a microbatch (miles.utils.replay_base): for each position of
its pack so many places in the pack, -1 for none. Two rollouts share a position only where all
layers chose the same places of the rollout, in any order: a number stands for these, in a column
beside its token. A segment takes the rows of one rollout of each span, and its places become rows
of the pool (layer.py), which lie there in the order of positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_prefix.errors import Reason, refused
from megatron_prefix.features.replay.swaps import stages_of_queues
from megatron_prefix.features.replay.told import RECORD, Queue, Told
from megatron_prefix.layers.model import balancing
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.refusals.table import OWN_DSA_REPLAY
from megatron_prefix.run.calls import CallLayout, layouts
from megatron_prefix.run.planning import Planning
from megatron_prefix.run.read.forward_step_state import Swap
from megatron_prefix.run.read.read_calls import CallTokens
from megatron_prefix.run.read.step import Step
from megatron_prefix.run.read.suspend import Capture, SuspendedStep
from megatron_prefix.run.request import Request
from megatron_prefix.tree import Forest

_FIRST, _SECOND, _LAYER = -7046029254386353131, -4417276706812531889, 1609587929392839161
"""Odd numbers, by which places and layers are spread over 64 bits."""


class IndexerReplay(StepPart):
    """What the indexers of this rank are to replay in a call."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._modules = [
            [
                module for module in model.modules()
                if hasattr(module, "indexer_replay") and not module.skip_topk
            ]
            for model in self.rank.language_models
        ]  # fmt: skip
        self._manager = sys.modules["miles.utils.replay_base"].indexer_replay_manager
        self.meets_data_ranks = not self.rank.forward_only  # so `build` is asked
        self._entries: dict[Any, list[Tensor]] = {}
        self._begins: list[list[int]] = []
        self._numbers: NDArray[np.int64] | None = None
        self._forest: Forest | None = None
        self._places: list[tuple[int, int]] = []

    def refusals(self) -> Iterator[Reason]:
        """See StepPart."""
        if self.rank.groups.cp.size() > 1:
            yield OWN_DSA_REPLAY.given("with context parallelism")
        if self.rank.groups.pp.size() > 1 and not any(self._modules):
            yield OWN_DSA_REPLAY.given("with a stage whose layers choose nothing")
        config = self.rank.config
        rate = (
            getattr(config, "moe_router_bias_update_rate", 0) if self.rank.model.has_experts else 0
        )
        moves_bias = rate and config.moe_router_enable_expert_bias
        if balancing(config) or getattr(config, "moe_z_loss_coeff", None) or moves_bias:
            yield OWN_DSA_REPLAY.given("and losses of experts, or their bias by load")

    def swaps(self, chunk: int) -> Sequence[Swap]:
        """See StepPart."""
        return [stages_of_queues()]

    def suspended(self, step: SuspendedStep) -> dict[Any, Told | None]:
        """See StepPart: what each module was told."""
        return {
            module: self._queue(module).told(step.number) for module in self._modules[step.chunk]
        }

    def read_last(self, capture: Capture, last: CallTokens | None) -> None:
        """See StepPart."""
        self._entries = {}
        for chunk, steps in enumerate(capture.steps):
            notes = [step.notes.pop(self) for step in steps]
            for module in self._modules[chunk]:
                self._entries[module] = [*_entries_of([note[module] for note in notes])]
        sequence_ranks = self.rank.model.sequence_ranks
        every = layouts(capture.calls(0), 1, sequence_ranks) or ()
        self._begins = [[*np.cumsum([0, *layout.lengths[:-1]]).tolist()] for layout in every]
        if not all(map(len, self._entries.values())):
            self._entries = {}
        if self._entries and self.rank.forward_only:
            raise refused(OWN_DSA_REPLAY, "in passes without gradients")
        for entries in self._entries.values():
            if [*map(len, entries)] != [sum(layout.lengths) for layout in every]:
                raise refused(OWN_DSA_REPLAY, "of another number of positions than calls have")

    def same(self, layouts: Sequence[CallLayout]) -> Sequence[Tensor | None]:
        """See StepPart; `build` takes what is found. All stages replay, or none does."""
        self._numbers = None
        if not self._entries:
            return ()
        total, num_wrong = None, torch.zeros(1, dtype=torch.int64, device=self.rank.device)
        for module, entries in self._entries.items():
            rows = [*map(self._relative, entries, self._begins)]
            of_layer = torch.cat([_numbers_of(places) for places, _ in rows]) * module.layer_number
            spread = of_layer * _LAYER
            spread = spread ^ (spread >> 31)
            total = spread if total is None else total + spread
            num_wrong += sum(_num_wrong(*each) for each in rows)
        numbers = torch.cat([total, num_wrong])  # type: ignore[list-item]
        if self.rank.groups.pp.size() > 1:
            dist.all_reduce(numbers, group=self.rank.groups.pp)
        self._numbers = numbers[:-1].cpu().numpy()
        if numbers[-1]:
            raise refused(OWN_DSA_REPLAY, "of later positions, of other samples or with gaps")
        return ()

    def build(
        self,
        step: Step,
        request: Request,
        planning: Planning,
        build: Callable[..., Forest],
        build_alone: Callable[..., Forest],
    ) -> Step | None:
        """See StepPart: segments of samples with a further column."""
        if self._numbers is None or step.samples is None:
            return None
        ends = np.cumsum([len(sample) for sample in step.samples])
        columns = np.split(self._numbers[:, None], ends[:-1])
        samples = [
            replace(sample, following=_beside(sample.following, column))
            for sample, column in zip(step.samples, columns, strict=True)
        ]
        return step.with_forest(build_alone(samples, step.microbatch_of))

    def begin(self, attempt: Attempt) -> None:
        """See StepPart."""
        step, counts = attempt.step, [0] * len(self._begins)
        self._forest, self._places = step.forest, []
        for microbatch in step.microbatch_of if self._entries else ():
            self._places.append((microbatch, self._begins[microbatch][counts[microbatch]]))
            counts[microbatch] += 1

    def choices(self, module: Any, index: int) -> Tensor | None:
        """Places in their rollouts that a segment's positions see, int [positions, topk], -1 for
        none; None: the indexer chooses."""
        if self._forest is None or module not in self._entries:
            return None
        entries, parts = self._entries[module], []
        for span in self._forest.segments[index].spans:
            microbatch, begin = self._places[span.rollouts[0]]
            rows = entries[microbatch][begin + span.start : begin + span.end].to(self.rank.device)
            parts.append(torch.where(rows < 0, rows, rows - begin))
            parts.append(rows.new_full((span.padded - span.length, rows.shape[1]), -1))
        return torch.cat(parts)

    def finished(self) -> None:
        """See StepPart: queues are left as by the stock schedule."""
        for module, entries in self._entries.items():
            self._queue(module).passed(len(entries), backward=not self.rank.forward_only)

    def end(self) -> None:
        """See StepPart."""
        self._forest = None

    def _queue(self, module: Any) -> Queue:
        return Queue(module.indexer_replay, self._manager)

    def _relative(self, entry: Tensor, begins: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Places in rollouts of one microbatch [positions, topk], those of rollouts before behind
        all others, and positions in rollouts."""
        device = self.rank.device
        rows, starts = entry.to(device).long(), torch.zeros(len(entry), dtype=torch.int64)
        starts[begins[1:]] = torch.tensor(begins).diff()
        starts = starts.cumsum(0).to(device)
        positions = torch.arange(len(entry), device=device) - starts
        places = (rows - starts[:, None]).masked_fill(rows < starts[:, None], len(entry))
        return torch.where(rows < 0, rows, places), positions


def choices_of(parts: Iterable[StepPart], module: Any, index: int) -> Tensor | None:
    """See `IndexerReplay.choices`; None also where nothing replays."""
    for part in parts:
        if isinstance(part, IndexerReplay):
            return part.choices(module, index)
    return None


def _beside(columns: NDArray[np.int64] | None, column: NDArray[np.int64]) -> NDArray[np.int64]:
    return column if columns is None else np.concatenate([columns, column], 1)


def _entries_of(told: Sequence[Told | None]) -> Iterator[Tensor]:
    """What one module replays at each call; nothing if it chooses."""
    for call in told:
        if call is not None and call.action == RECORD:
            raise refused(OWN_DSA_REPLAY, "while they are recorded")
        if call is not None and call.routes is not None:
            yield call.routes
    if any(call is None or call.routes is None for call in told) and any(told):
        raise refused(OWN_DSA_REPLAY, "in some calls only")


def _num_wrong(places: Tensor, positions: Tensor) -> Tensor:
    """How many places are behind their positions, or in no rollout of theirs; and how many
    positions have none though the next one has some: miles lets these see the pack's first rows."""
    has_none = (places < 0).all(1)
    gaps = has_none[:-1] & ~has_none[1:] & (positions[1:] > 0)
    return (places > positions[:, None]).sum() + gaps.sum()


def _numbers_of(places: Tensor) -> Tensor:
    """A number for each set of places, int64 [positions]; -1 counts nothing."""
    spread = (places + 1) * _FIRST
    spread = (spread ^ (spread >> 29)) * _SECOND
    return (spread ^ (spread >> 32)).masked_fill(places < 0, 0).sum(1)
