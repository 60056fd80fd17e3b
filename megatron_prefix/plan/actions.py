"""Actions and plans.  Pure.

A plan is data: one line a rank, one cell an action. `F3` is the forward of segment 3, `B3` its
backward; with virtual stages `F3.1` is the forward on model chunk 1 of that rank. Sends and
receives between stages are not written: see plan/timetable.py. Those between data-parallel ranks
are: `S3>1` sends to rank 1, `R3<1` receives from it (`S3.1>0` on model chunk 1).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_prefix.tree import Segment

ON_DEVICE = ("retain", "recompute_act")
POLICIES = (*ON_DEVICE, "offload", "recompute")
"""What a segment keeps between its forward and its backward; see PrefixConfig.memory. Waves keep
it on the device."""
SIGNS = {"S": ">", "R": "<"}
"""Before the peer of an action."""
STEP = {"F": 1, "B": -1}
"""Stages between an action and the one that needs what it makes."""


class Action(NamedTuple):
    """One cell of a plan."""

    kind: str  # "F", "B"; "S", "R": sends, receives a segment's payload or its gradients
    segment: int  # in F-order
    chunk: int = 0  # model chunk of the rank (virtual stages)
    peer: int = -1  # the other data-parallel rank of "S" or "R"

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        peer = f"{SIGNS[self.kind]}{self.peer}" if self.kind in SIGNS else ""
        return f"{self.kind}{self.segment}{chunk}{peer}"


class Transfer(NamedTuple):
    """Spans of a segment that this rank computes and another data-parallel rank, `peer`, reads."""

    segment: int
    peer: int
    spans: tuple[int, ...]


class Sent(NamedTuple):
    """What of a segment other data-parallel ranks get, each of them counted."""

    positions: int  # padding included
    spans: int
    copied: int  # positions that go to ranks whose spans are not neighbours
    copied_spans: int
    depth: int = -1  # of the segment, which crosses or is received; -1: neither


@dataclass(frozen=True)
class Plan:
    """What every rank of a pipeline does in one step."""

    segments: tuple[Segment, ...]  # in F-order
    programs: tuple[tuple[Action, ...], ...]  # per pipeline rank its actions in order
    num_chunks: int = 1  # model chunks a rank (virtual stages)
    policies: tuple[str, ...] = ()  # per segment one of POLICIES; empty: all retain
    transfers: tuple[Transfer, ...] = ()  # payloads sent, one of each segment and peer
    sent: tuple[Sent, ...] = ()  # per segment, for its memory; empty: nothing. Not in a file

    @property
    def num_ranks(self) -> int:
        return len(self.programs)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @property
    def crosses(self) -> bool:
        """Segments cross data-parallel ranks."""
        return bool(self.transfers) or any(segment.source >= 0 for segment in self.segments)

    @functools.cached_property
    def peak_positions(self) -> tuple[int, ...]:
        """Per rank the most positions that it computes and holds between forward and end of
        backward; one on one of v model chunks counts 1/v (rounded up)."""
        held = [0 if s.source >= 0 else s.padded_length for s in self.segments]
        peaks = (
            max(itertools.accumulate((STEP[kind] * held[i] for kind, i, *_ in program), initial=0))
            for program in self.programs
        )
        return tuple(-(-peak // self.num_chunks) for peak in peaks)

    def stage(self, rank: int, chunk: int) -> int:
        """Stage that model chunk `chunk` of a pipeline rank holds, counted from the embedding."""
        return chunk * self.num_ranks + rank

    def receiver(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """Rank and action that need what an action makes; None at the end of the pipeline."""
        kind, index, chunk, _ = action
        chunk, rank = divmod(self.stage(rank, chunk) + STEP[kind], self.num_ranks)
        return (rank, Action(kind, index, chunk)) if 0 <= chunk < self.num_chunks else None

    def actions_of(self, rank: int, chunk: int) -> list[tuple[str, int]]:
        """("F" or "B", segment) of one model chunk of a rank, in order."""
        return [(kind, index) for kind, index, on, _ in self.programs[rank] if on == chunk]

    def policy(self, index: int) -> str:
        return self.policies[index] if self.policies else "retain"


def policies(segments: Sequence[Segment], memory: str) -> tuple[str, ...]:
    """The policy of every segment of a step, or () where all retain.

    `memory` is that of inner segments, and with "recompute_act" of waves. Else these retain, as
    their backward follows their forward, and so do segments of other ranks. "auto" retains here;
    see memory_policy.py.
    """
    if memory in ("retain", "auto"):
        return ()
    waves = memory in ON_DEVICE
    return tuple(
        memory if segment.source < 0 and (segment.waits or waves) else "retain"
        for segment in segments
    )
