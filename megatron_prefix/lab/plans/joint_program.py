"""What every rank of a job does in a step, in the order in which it issues it.  Pure.

Data-parallel ranks exchange prompts (features/across/exchanges.py), stages of their pipelines
messages (run/execute/messages.py), ranks that share experts tokens in every expert layer, and where
the global batch is balanced all of them sum counts (features/experts/group_counts.py).  In the last
backward of a model chunk gradients begin to be reduced between the exchanges of tokens of its
layers (features/overlap/reductions.py).  Here all of that is one program a rank; joint_judge.py
says whether all of them end.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_prefix.features.experts.sums import sums_of
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.timetable import StageMessage, Sum, message_gaps
from megatron_prefix.tree import Forest
from megatron_prefix.tree.forest import Exchange


class Rank(NamedTuple):
    """One rank of the job."""

    data: int
    stage: int

    def __str__(self) -> str:
        return f"rank {self.data}.{self.stage}"


class End(NamedTuple):
    """One end of a message.

    Attributes:
        kind: "S" or "R".
        peer: where the other end is.
        channel: messages of one channel between two ranks come in the order in which they leave.
        what: that crosses, the same at both ends.
        segment, chunk: of the rank that has the end.
    """

    kind: str
    peer: Rank
    channel: str
    what: Hashable
    segment: int
    chunk: int

    def __str__(self) -> str:
        sign = ">" if self.kind == "S" else "<"
        return f"{self.kind}{self.segment}.{self.chunk}{sign}{self.peer.data}.{self.peer.stage}"


class Batch(NamedTuple):
    """Messages that a rank begins at once: it goes on when all of them have crossed."""

    ends: tuple[End, ...]


class Meet(NamedTuple):
    """What some ranks do together: it ends when all of them have come to it.

    Attributes:
        channel: meetings of one channel of some ranks come in one order on all of them.
        what: the same on all.
        ranks: that meet.
    """

    channel: str
    what: Hashable
    ranks: tuple[Rank, ...]


LAYERS = 2
"""Layers of every model chunk, as far as it matters: exchanges of tokens, and gradients."""

Step = Action | Batch | Meet
Programs = dict[Rank, list[Step]]


@dataclass(frozen=True)
class Pipeline:
    """The stages of one data-parallel rank.

    Attributes:
        plan: with F and B alone; what crosses is where `planner.with_crossing` has it.
        forest: its segments.
        union: the plan on the segments of all ranks that share experts with it; without experts the
            plan itself.
        experts: these data-parallel ranks, or none.
        names: per segment and span what it is, the same on all ranks that have it.
        microbatch_of, owners: the microbatch of each rollout, and of each of the union's.
        ready_after: see `planner.loss_ready_after`.
    """

    plan: Plan
    forest: Forest
    union: Plan
    experts: tuple[int, ...]
    names: Sequence[Sequence[Hashable]]
    microbatch_of: Sequence[int]
    owners: Sequence[int]
    ready_after: Sequence[int]


def joint_programs(
    pipelines: Sequence[Pipeline], *, counts: bool = False, overlaps: bool = False
) -> Programs:
    """The programs of all ranks of a job.

    Args:
        pipelines: one a data-parallel rank.
        counts: routers balance the global batch.
        overlaps: gradients are reduced during backwards, unless prompts cross data-parallel ranks.
    """
    early = overlaps and not any(one.forest.exchanges for one in pipelines)
    return {
        Rank(data, stage): [
            *_Writer(one, Rank(data, stage), range(len(pipelines)), counts, early).steps(),
            *_rest(one, Rank(data, stage), len(pipelines), overlaps, early),
        ]
        for data, one in enumerate(pipelines)
        for stage in range(one.plan.num_ranks)
    }


def _reduced(pipeline: Pipeline, rank: Rank, num: int, chunk: int, layer: int) -> Iterator[Meet]:
    """Gradients of a layer's weights, layer -1 those outside of layers: of experts on ranks that
    have the same ones, of all others on all."""
    everyone = tuple(Rank(data, rank.stage) for data in range(num))
    yield Meet("gradients", (chunk, layer), everyone)
    if pipeline.experts and layer >= 0:
        alike = everyone[rank.data % len(pipeline.experts) :: len(pipeline.experts)]
        yield Meet("gradients", (chunk, layer), alike)


def _rest(pipeline: Pipeline, rank: Rank, num: int, overlaps: bool, early: bool) -> Iterator[Meet]:
    """Reductions that begin behind a rank's last action."""
    chunks = [*reversed(range(pipeline.plan.num_chunks))]
    early = early and len(pipeline.plan.programs[rank.stage]) > 0
    for chunk in chunks if overlaps and not early else ():
        for layer in reversed(range(LAYERS)):
            yield from _reduced(pipeline, rank, num, chunk, layer)
    for chunk in chunks if overlaps else ():
        yield from _reduced(pipeline, rank, num, chunk, -1)


class _Writer:
    """Writes one rank's program as `Executor.run` goes through its actions."""

    def __init__(
        self, pipeline: Pipeline, rank: Rank, everyone: Sequence[int], counts: bool, early: bool
    ) -> None:
        self.pipeline, self.rank, self.everyone = pipeline, rank, everyone
        self.counts, self.early = counts, early
        self.segments = pipeline.plan.segments
        self.depth_of = {one.segment: one.depth for one in pipeline.forest.exchanges}
        levels = itertools.groupby(pipeline.forest.exchanges, lambda one: one.depth)
        self.levels = [[*of_level] for _, of_level in levels]
        self.begun = 0
        self.crossed = [0] * pipeline.plan.num_chunks
        self.returned = [len(self.levels)] * pipeline.plan.num_chunks

    def steps(self) -> Iterator[Step]:
        """All of them."""
        levels = tuple((one.segment, one.depth) for one in self.pipeline.forest.exchanges)
        union, program = self.pipeline.union, self.pipeline.plan.programs[self.rank.stage]
        sums = sums_of(union, self.pipeline.owners) if self.counts else ()
        gaps = iter(message_gaps(union, self.rank.stage, levels, *sums))
        yield from self._messages(next(gaps))
        last = {one.chunk: one for one in program if one.kind == "B"}
        for action in program:
            yield from self._crossing(action)
            yield from self._messages(next(gaps))
            if self.segments[action.segment].source < 0:
                yield action
                reduces = self.early and last.get(action.chunk) == action
                yield from self._layers(action, reduces=reduces)
            yield from self._messages(next(gaps))

    def _layers(self, action: Action, *, reduces: bool) -> Iterator[Meet]:
        """What ranks exchange inside an action, layer by layer."""
        layers = range(LAYERS)
        for layer in layers if action.kind == "F" else reversed(layers):
            if self.pipeline.experts:
                yield Meet("experts", (action, layer), self._beside(self.pipeline.experts))
            if reduces:
                num = len(self.everyone)
                yield from _reduced(self.pipeline, self.rank, num, action.chunk, layer)

    def _beside(self, datas: Iterable[int]) -> tuple[Rank, ...]:
        """The ranks of other pipelines at this stage."""
        return tuple(Rank(one, self.rank.stage) for one in datas)

    def _messages(self, messages: Sequence[StageMessage | Sum]) -> Iterator[Batch | Meet]:
        """Between stages, each for itself, and sums between them."""
        for one in messages:
            if isinstance(one, Sum):
                for microbatch in range(self.begun, one.number):
                    yield Meet("counts", microbatch, self._beside(self.everyone))
                self.begun = one.number
                continue
            sends = one.sender == self.rank.stage
            action = one.made_by if sends else one.used_by
            peer = self.rank._replace(stage=one.receiver if sends else one.sender)
            what = one.used_by.kind, one.used_by.segment, one.used_by.chunk
            yield Batch((End("SR"[not sends], peer, one.used_by.kind, what, *action[1:3]),))

    def _crossing(self, action: Action) -> Iterator[Batch]:
        """What crosses data-parallel ranks before an action, as `Exchanges` has it."""
        level, chunk = self.depth_of.get(action.segment, len(self.levels)), action.chunk
        if action.kind == "F":
            for one in range(len(self.crossed)):
                if one < chunk or level == len(self.levels):
                    yield from self._cross(one, len(self.levels))
        yield from self._cross(chunk, level if action.kind == "F" else len(self.levels))
        while action.kind == "B" and self.returned[chunk] > level:
            self.returned[chunk] -= 1
            yield from self._batch(reversed(self.levels[self.returned[chunk]]), chunk, back=True)

    def _cross(self, chunk: int, level: int) -> Iterator[Batch]:
        while self.crossed[chunk] < level:
            yield from self._batch(self.levels[self.crossed[chunk]], chunk, back=False)
            self.crossed[chunk] += 1

    def _batch(self, level: Iterable[Exchange], chunk: int, *, back: bool) -> Iterator[Batch]:
        """A level's payloads, or their gradients."""
        ends = []
        for one in level:
            received = self.segments[one.segment].source >= 0
            for peer, spans in one.peers:
                names = tuple(self.pipeline.names[one.segment][span] for span in spans)
                what = "gradients" if back else "payload", names, chunk
                there = Rank(peer, self.rank.stage)
                kind = "S" if received is back else "R"
                ends.append(End(kind, there, "across", what, one.segment, chunk))
        if ends:
            yield Batch(tuple(ends))
