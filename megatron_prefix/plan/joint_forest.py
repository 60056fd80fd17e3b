"""One plan for pipelines whose ranks share experts.  [pure]

Ranks that share experts exchange tokens in every expert layer: a backward returns gradients to the
ranks whose tokens came in the forward. So segments that run forward together must run backward
together, on every stage. The F-orders of these ranks are aligned: segments with readers run beside
segments with readers, waves and joined segments beside waves. The union is one forest, in which a
segment has the parents that it has on any rank; its plan is the plan of all ranks. A rank without a
segment at a place runs a dummy segment, which is only padding. Ranks that all-gather their tokens
need equally many, so there all segments at one place are padded to the longest.

Segments that cross data-parallel ranks come first, level by level of their trees: those that ranks
compute, then those that they receive, where nothing runs on any rank. So nothing that ranks wait
for together depends on a later action of one of them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from megatron_prefix.plan.actions import Sent
from megatron_prefix.tree import Forest, Place, Segment, Span
from megatron_prefix.tree.forest import Exchange

_Node = tuple[int | None, ...]
"""Per forest the segment at one place of the union; None: no segment."""


@dataclass(frozen=True)
class JointForest:
    """A rank's forest, and its union with those of ranks that run together with it.

    Attributes:
        forest: the rank's own, with dummy segments.
        microbatch_of: the trainer's microbatch of each of its rollouts.
        union: all forests as one; rollouts are numbered on from one forest to the next, and so are
            microbatches unless the forests are ordered.
        union_microbatch_of: the microbatch of each rollout of the union.
        microbatches_of: per forest the microbatch of each of its own rollouts.
        most: per place of the union the most positions, and the most spans, of a forest's segment;
            empty: one forest.
        sent: per place of the union the most that a segment sends; empty: nothing.
        mixed: whether only some pipelines join prompts with their suffixes (tree/joining.py): then
            most places pair a segment with dummy segments.
    """

    forest: Forest
    microbatch_of: tuple[int, ...]
    union: Forest
    union_microbatch_of: tuple[int, ...]
    microbatches_of: tuple[tuple[int, ...], ...]
    most: tuple[tuple[int, int], ...]
    sent: tuple[Sent, ...]
    mixed: bool

    @classmethod
    def alone(cls, forest: Forest, microbatch_of: Sequence[int]) -> JointForest:
        """A forest that is its own union."""
        owners = tuple(microbatch_of)
        return cls(forest, owners, forest, owners, (owners,), (), _sent([forest]), mixed=False)

    @property
    def num_pipelines(self) -> int:
        return len(self.microbatches_of)


def joint_forest(
    forests: Sequence[Forest],
    microbatches_of: Sequence[Sequence[int]],
    place: int = 0,
    *,
    even: bool = False,
) -> JointForest:
    """Merges forests, one per pipeline.

    Args:
        forests: of all pipelines.
        microbatches_of: per forest the trainer's microbatch of every rollout.
        place: of the rank's own pipeline.
        even: pad segments that run together to the length of the longest.
    """
    levels, crossing = _crossing_places(forests)
    nodes = crossing + _aligned_places(forests)
    sources = [_source(forests, node) for node in nodes]
    filled = [_with_dummies(forest, nodes, sources, levels, i) for i, forest in enumerate(forests)]
    if even:
        filled = _evened(filled)
    own, ordered = forests[place], any(forest.ordered for forest in forests)
    lengths = [forest.requested_length for forest in forests if forest.requested_length]
    union = Forest(
        tuple(_union(filled, sources)),
        tuple(number for forest in forests for number in forest.num_positions),
        tuple(number for forest in forests for number in forest.first_trained),
        own.multiple, ordered, pad_multiple=own.pad_multiple,
        requested_length=min(lengths, default=0),
        exchanges=tuple(Exchange(place, (), level) for place, level in enumerate(levels)),
    )  # fmt: skip
    owners = tuple(map(tuple, microbatches_of))
    return JointForest(
        filled[place], owners[place], union, tuple(_numbered(microbatches_of, ordered)), owners,
        tuple(map(_most, *(forest.segments for forest in filled))), _sent(filled),
        _is_mixed(forests),
    )  # fmt: skip


def _is_mixed(forests: Sequence[Forest]) -> bool:
    """`JointForest.mixed`; a forest without inner segments fits both."""
    inner = [[segment for segment in forest.segments if segment.inner] for forest in forests]
    return len({any(segment.waits for segment in segments) for segments in inner if segments}) == 2


def _most(*segments: Segment) -> tuple[int, int]:
    positions = max(segment.padded_length for segment in segments)
    return positions, max(len(segment.spans) for segment in segments)


def _sent(forests: Sequence[Forest]) -> tuple[Sent, ...]:
    """Per place the most that a forest sends; all have equally many segments."""
    if not any(forest.exchanges for forest in forests):
        return ()
    most = [[0, 0, 0, 0, -1] for _ in forests[0].segments]
    for forest in forests:
        for exchange in forest.exchanges:
            segment, row_sum = forest.segments[exchange.segment], [0, 0, 0, 0]
            for _, spans in exchange.peers if segment.source < 0 else ():
                positions = sum(segment.spans[span].padded for span in spans)
                apart = spans[-1] - spans[0] >= len(spans)
                row = (positions, len(spans), positions * apart, len(spans) * apart)
                row_sum = [*map(sum, zip(row_sum, row, strict=True))]
            counts = (*row_sum, exchange.depth)
            most[exchange.segment] = [*map(max, zip(most[exchange.segment], counts, strict=True))]
    return tuple(Sent(*row) for row in most)


def _numbered(microbatches_of: Sequence[Sequence[int]], ordered: bool) -> Iterator[int]:
    """Microbatches of the union; in ordered forests equal numbers are the same microbatch."""
    first = 0
    for microbatch_of in microbatches_of:
        yield from (first + microbatch for microbatch in microbatch_of)
        first += 0 if ordered else max(microbatch_of, default=-1) + 1


def _crossing_places(forests: Sequence[Forest]) -> tuple[list[int], list[_Node]]:
    """Depths and places of segments that cross data-parallel ranks; forests begin with them."""
    rows: dict[tuple[int, bool], list[list[int]]] = {}
    for place, forest in enumerate(forests):
        for exchange in forest.exchanges:
            received = forest.segments[exchange.segment].source >= 0
            row = rows.setdefault((exchange.depth, received), [[] for _ in forests])
            row[place].append(exchange.segment)
    places = [
        (level, node) for (level, _), row in sorted(rows.items()) for node in zip_longest(*row)
    ]
    return [level for level, _ in places], [node for _, node in places]


def _source(forests: Sequence[Forest], node: _Node) -> int:
    """`Segment.source` of a place; -1: computed."""
    indexed = zip(forests, node, strict=True)
    return max(forest.segments[index].source for forest, index in indexed if index is not None)


def _aligned_places(forests: Sequence[Forest]) -> list[_Node]:
    """Places after the crossing segments, in F-order. If some forests have a segment without
    waiting readers next, those run first. Ordered forests go round by round, as losses wait for all
    ranks."""
    nodes: list[_Node] = []
    done = [len(forest.exchanges) for forest in forests]
    rounds = [(f.ordered and f.rounds) or (0,) * len(f.segments) for f in forests]
    for number in sorted({*itertools.chain(*rounds)}):
        ends = [bisect.bisect(rounds_of, number) for rounds_of in rounds]
        while any(place < end for place, end in zip(done, ends, strict=True)):
            waiting = [
                forest.segments[place].waits if place < end else None
                for place, end, forest in zip(done, ends, forests, strict=True)
            ]
            advances = [waits is (False not in waiting) for waits in waiting]
            nodes.append(tuple(n if take else None for n, take in zip(done, advances, strict=True)))
            done = [n + take for n, take in zip(done, advances, strict=True)]
    return nodes


def _with_dummies(
    forest: Forest,
    nodes: Sequence[_Node],
    sources: Sequence[int],
    levels: Sequence[int],
    place: int,
) -> Forest:
    """A forest with dummy segments at its empty places; nothing runs at received places."""
    length = math.lcm(forest.multiple, forest.pad_multiple)
    filler = Segment((Span(0, 0, length, ()),), inner=False, scored=False, trained=0)
    new: dict[int, int] = {}
    segments = []
    for number, (node, source) in enumerate(zip(nodes, sources, strict=True)):
        index = node[place]
        if index is None:
            segments.append(filler._replace(source=source))
        else:
            new[index] = number
            segments.append(_renumbered(forest.segments[index], new))
    exchanges = [exchange._replace(segment=new[exchange.segment]) for exchange in forest.exchanges]
    for number, (level, node) in enumerate(zip(levels, nodes, strict=False)):
        if node[place] is None:
            exchanges.append(Exchange(number, (), level))
    exchanges.sort(key=lambda exchange: exchange.depth)  # within a depth in the order of all ranks
    return replace(forest, segments=tuple(segments), exchanges=tuple(exchanges), rounds=())


def _evened(forests: Sequence[Forest]) -> list[Forest]:
    """Each segment padded to the longest at its place."""
    places = [*zip(*(forest.segments for forest in forests), strict=True)]
    longest = [max(segment.padded_length for segment in place) for place in places]
    return [
        replace(forest, segments=tuple(map(_lengthened, forest.segments, longest)))
        for forest in forests
    ]


def _lengthened(segment: Segment, length: int) -> Segment:
    missing = length - segment.padded_length
    padding = (Span(0, 0, missing, ()),) if missing else ()
    return segment._replace(spans=segment.spans + padding)


def _renumbered(segment: Segment, new: Mapping[int, int]) -> Segment:
    spans = [
        span._replace(parent=Place(new[span.parent.segment], span.parent.number))
        if span.parent and new[span.parent.segment] != span.parent.segment
        else span
        for span in segment.spans
    ]
    joined = -1 if segment.joined < 0 else new[segment.joined]
    return segment._replace(spans=tuple(spans), joined=joined)


def _union(forests: Sequence[Forest], sources: Sequence[int]) -> Iterator[Segment]:
    """Segments at one place as one; spans and rollouts are numbered on from forest to forest."""
    rollouts = [0, *itertools.accumulate(len(forest.num_positions) for forest in forests)]
    before: list[list[int]] = []  # per place and forest the spans of the forests before it
    places = zip(sources, *(forest.segments for forest in forests), strict=True)
    for index, (source, *segments) in enumerate(places):
        before.append([0, *itertools.accumulate(len(segment.spans) for segment in segments)])
        spans = [*segments[0].spans]
        for number, segment in enumerate(segments[1:], start=1):
            for span in segment.spans:
                members = tuple(rollouts[number] + rollout for rollout in span.rollouts)
                parent = span.parent
                if parent is not None:
                    shift = before[parent.segment][number]
                    parent = Place(parent.segment, parent.number + shift)
                spans.append(span._replace(rollouts=members, parent=parent))
        inner, scored = (any(flags) for flags in zip(*(s[1:3] for s in segments), strict=True))
        trained = [segment.trained for segment in segments if segment.trained is not None]
        all_known = len(trained) == len(segments)
        joined = index if any(segment.joined >= 0 for segment in segments) else -1
        yield Segment(
            tuple(spans), inner, scored, sum(trained) if all_known else None, source, joined=joined
        )
