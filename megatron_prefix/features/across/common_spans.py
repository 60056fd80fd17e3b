"""Spans that rollouts of this rank have in common with those of others: where its tree is cut, and
which of its spans another rank computes.  Pure: numpy only.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import NamedTuple

from megatron_prefix.tree.packing import ExchangedSegment


class CommonSpan(NamedTuple):
    """Positions [start, end) of beginnings on several ranks.

    Attributes:
        start, end: multiples of the trees' boundary.
        parent: the common span that it continues, with a smaller number; -1: none.
        depth: common spans above it.
        scored: whether positions may carry loss on any of them.
    """

    start: int
    end: int
    parent: int
    depth: int
    ranks: tuple[int, ...]
    scored: bool = False

    @property
    def saved(self) -> int:
        """Positions that are computed once and not once more on every other rank."""
        return (len(self.ranks) - 1) * (self.end - self.start)


class CommonSegment(NamedTuple):
    """Common spans that one rank computes at once.

    Attributes:
        spans: their numbers; spans with one parent are neighbours.
    """

    owner: int
    spans: tuple[int, ...]


@dataclass(frozen=True)
class CommonSpans:
    """What the ranks of a job have in common, as one of them sees it.

    Attributes:
        spans: parents before children.
        segments: in the order in which they cross.
        below: per beginning of this rank the last common span of it; -1: none.
    """

    rank: int = 0
    spans: tuple[CommonSpan, ...] = ()
    segments: tuple[CommonSegment, ...] = ()
    below: tuple[int, ...] = ()

    def exchanged(self) -> tuple[ExchangedSegment, ...]:
        """What crosses ranks, as far as this one has it."""
        return tuple(
            self._exchanged_segment(segment) for segment in self.segments if self.here(segment)
        )

    def _exchanged_segment(self, segment: CommonSegment) -> ExchangedSegment:
        source, spans = self.source(segment), self.here(segment)
        peers = self.peers(segment) if source < 0 else ((source, tuple(range(len(spans)))),)
        first = self.spans[segment.spans[0]]
        return ExchangedSegment(spans, source, peers, first.depth, first.scored)

    def source(self, segment: CommonSegment) -> int:
        """The rank that sends a segment's payload; -1: this one computes it."""
        return -1 if segment.owner == self.rank else segment.owner

    def here(self, segment: CommonSegment) -> tuple[int, ...]:
        return tuple(span for span in segment.spans if self.rank in self.spans[span].ranks)

    def peers(self, segment: CommonSegment) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The ranks that get a segment's payload, each with the places of its spans in it."""
        places = collections.defaultdict(list)
        for place, span in enumerate(segment.spans):
            for rank in self.spans[span].ranks:
                places[rank].append(place)
        places.pop(segment.owner, None)
        return tuple((rank, tuple(places[rank])) for rank in sorted(places))
