"""Actions and plans.  Pure.

A plan is data: one line a rank, one cell an action. `F3` is the forward of segment 3, `B3` its
backward; with virtual stages `F3.1` is the forward on model chunk 1 of that rank. Sends and
receives between stages are not written: a stage receives right before the action that needs the
message and sends right after the action that made it. torch.distributed.pipelining prints its
schedules in the same way. Those between data-parallel ranks are: `S3>1` sends to rank 1, `R3<1`
receives from it (`S3.1>0` on model chunk 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_prefix.tree import Segment

ON_DEVICE = ("retain", "recompute_act")
POLICIES = (*ON_DEVICE, "offload", "recompute")
"""What a segment can keep between its forward and its backward; see PrefixConfig.memory. Waves keep
it on the device."""
SIGNS = {"S": ">", "R": "<"}
"""Before the peer of an action."""


class Action(NamedTuple):
    """One cell of a plan.

    Attributes:
        kind: "F" or "B"; "S" or "R", which send or receive a segment's payload or its gradients.
        segment: index in F-order.
        chunk: model chunk of the rank (0 without virtual stages).
        peer: the other data-parallel rank of "S" or "R"; -1 of "F" and "B".
    """

    kind: str
    segment: int
    chunk: int = 0
    peer: int = -1

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        peer = f"{SIGNS[self.kind]}{self.peer}" if self.kind in SIGNS else ""
        return f"{self.kind}{self.segment}{chunk}{peer}"


class Transfer(NamedTuple):
    """A segment that this rank computes and another data-parallel rank reads.

    Attributes:
        segment: index in F-order.
        peer: the data-parallel rank that gets its payload.
        spans: numbers of the segment's spans that the peer gets.
    """

    segment: int
    peer: int
    spans: tuple[int, ...]


class Sent(NamedTuple):
    """What of a segment other data-parallel ranks get, each of them counted.

    Attributes:
        positions, spans: of the segment, padding included.
        copied, copied_spans: those of them that go to ranks whose spans are not neighbours.
        level: of the segment, which crosses or is received; -1: neither.
    """

    positions: int
    spans: int
    copied: int
    copied_spans: int
    level: int = -1


@dataclass(frozen=True)
class Plan:
    """What every rank of a pipeline does in one step.

    Attributes:
        segments: the step's segments in F-order.
        programs: per pipeline rank its actions in order.
        num_chunks: model chunks a rank (virtual stages), 1 without interleaving.
        policies: per segment one of POLICIES; empty: all retain.
        transfers: payloads that this data-parallel rank sends, one of each segment and peer.
        sent: what of each segment crosses, for the memory that it takes; empty: nothing. Not in a
            file.
    """

    segments: tuple[Segment, ...]
    programs: tuple[tuple[Action, ...], ...]
    num_chunks: int = 1
    policies: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    sent: tuple[Sent, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Pipeline size."""
        return len(self.programs)

    @property
    def crosses(self) -> bool:
        """Whether segments cross data-parallel ranks."""
        return bool(self.transfers) or any(segment.source >= 0 for segment in self.segments)

    @property
    def num_stages(self) -> int:
        """Pipeline size times virtual stages."""
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Stage that model chunk `chunk` of a pipeline rank holds, counted from the embedding."""
        return chunk * self.num_ranks + rank

    def actions_of(self, rank: int, chunk: int) -> list[tuple[str, int]]:
        """("F" or "B", segment) of one model chunk of a rank, in order."""
        return [(kind, index) for kind, index, on, _ in self.programs[rank] if on == chunk]

    def policy(self, index: int) -> str:
        """What a segment keeps between its forward and its backward."""
        return self.policies[index] if self.policies else "retain"


def policies(segments: Sequence[Segment], memory: str) -> tuple[str, ...]:
    """The policy of every segment of a step, or () where all retain.

    Args:
        segments: of the step.
        memory: the policy of inner segments, and with "recompute_act" of waves. Else these retain:
            their backward follows their forward; and so do segments of other ranks.
            "auto" retains here; see memory_policy.py.
    """
    if memory in ("retain", "auto"):
        return ()
    waves = memory in ON_DEVICE
    return tuple(
        memory if segment.source < 0 and (segment.waits or waves) else "retain"
        for segment in segments
    )
