"""Spans that rollouts on several data-parallel ranks have in common.  Pure: numpy only.

Trainers deal the rollouts of a prompt to several ranks. What they begin with, up to the first
position that carries loss, runs once in the whole job: on an *owner*, one of the ranks that have
it, which sends its payload to the others and gets their gradients back. All ranks know digests of
the beginnings of all, and each comes to the same answer: the common spans, their owners, the
segments that they are in, and when they cross.

A step has *windows*: equal parts of every rank's microbatches. A segment crosses when the first
window begins in which any rank needs it, and its gradients cross when the last one ends. In this
order, the same on all ranks, no exchange waits for a later one: a span's parents cross before it,
and their gradients after its own.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_prefix.tree.forest import Pairs, TreeOptions
from megatron_prefix.tree.nodes import Node
from megatron_prefix.tree.parts import equal_bounds, even_parts

_BYTES = 16
BLOCK = 8
"""Positions between two digests of a beginning, each of 16 bytes: beginnings that branch inside a
block have only what is before it in common. Blocks of 1 lose nothing and send as much as tokens."""

Trie = Callable[[Mapping[int, np.ndarray], TreeOptions], list[Node]]
"""Makes the prefix tree of codes, by number; see `build.trie`."""


class RankBeginnings(NamedTuple):
    """What a rank tells the others of its beginnings: digests, and no token.

    A beginning is what rollouts begin with before any position that carries loss. Digests have 128
    bits of a cryptographic hash (BLAKE2b): beginnings with equal ones are taken as equal.

    Attributes:
        lengths: positions of each beginning, all of them different: int64 [num].
        digests: of each one's first block, its first two, and so on up to all of it: uint64
            [sum of their blocks, 2]. The last block may be shorter.
        first, last: the first and the last of the rank's microbatches that have it: int64 [num].
        own: positions of its rollouts behind them.
        num_microbatches: of the trainer.
        block: positions of a block, a multiple of the trees' boundary.
    """

    lengths: np.ndarray
    digests: np.ndarray
    first: np.ndarray
    last: np.ndarray
    own: int
    num_microbatches: int
    block: int

    def ends(self) -> np.ndarray:
        """Where the digests of each beginning end: int64 [num]."""
        return np.cumsum(-(-self.lengths // self.block))


class CommonSpan(NamedTuple):
    """Positions [start, end) of beginnings on several ranks.

    Attributes:
        start, end: multiples of the trees' boundary.
        parent: the common span that it continues, with a smaller number; -1: none.
        level: common spans above it.
        ranks: that have it, ascending.
        first, last: the windows in which any of them needs it first and last.
    """

    start: int
    end: int
    parent: int
    level: int
    ranks: tuple[int, ...]
    first: int
    last: int


class CommonSegment(NamedTuple):
    """Common spans that one rank computes at once.

    Attributes:
        owner: the rank.
        spans: their numbers; spans with one parent are neighbours.
        first, last: see CommonSpan; of all of them.
    """

    owner: int
    spans: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class CommonSpans:
    """What the ranks of a job have in common, as one of them sees it.

    Attributes:
        rank: this one.
        spans: parents before children.
        segments: in the order in which they cross.
        below: per beginning of this rank the last common span of it; -1: none.
        num_microbatches: of this rank.
        num_windows: of the step.
    """

    rank: int = 0
    spans: tuple[CommonSpan, ...] = ()
    segments: tuple[CommonSegment, ...] = ()
    below: tuple[int, ...] = ()
    num_microbatches: int = 1
    num_windows: int = 1

    def window_of(self, microbatch: int) -> int:
        """The window in which one of this rank's microbatches runs."""
        window = _window(microbatch, self.num_microbatches, self.num_windows)
        return min(window, self.num_windows - 1)

    def beginning(self, window: int) -> Iterator[CommonSegment]:
        """The segments of this rank that cross when a window begins."""
        return (one for one in self.segments if one.first == window and self.here(one))

    def source(self, segment: CommonSegment) -> int:
        """The rank that sends a segment's payload; -1: this one computes it."""
        return -1 if segment.owner == self.rank else segment.owner

    def here(self, segment: CommonSegment) -> tuple[int, ...]:
        """Spans of a segment that this rank has."""
        return tuple(span for span in segment.spans if self.rank in self.spans[span].ranks)

    def peers(self, segment: CommonSegment) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The ranks that get a segment's payload, each with the places of its spans in it."""
        places = collections.defaultdict(list)
        for place, span in enumerate(segment.spans):
            for rank in self.spans[span].ranks:
                places[rank].append(place)
        places.pop(segment.owner, None)
        return tuple((rank, tuple(places[rank])) for rank in sorted(places))


NOTHING_IN_COMMON = CommonSpans()
"""Of a rank that is alone."""


def beginnings_of(
    rollouts: Sequence[Pairs],
    microbatch_of: Sequence[int],
    options: TreeOptions,
    block: int = BLOCK,
) -> tuple[RankBeginnings, list[int]]:
    """What a rank tells the others, and per rollout the number of its beginning.

    Args:
        rollouts: of the step, on this rank.
        microbatch_of: the trainer's microbatch of each.
        options: see TreeOptions; beginnings end at a multiple of the boundary.
        block: positions between digests, rounded up to such a multiple.
    """
    block = -(-block // options.boundary) * options.boundary
    known: dict[bytes, int] = {}
    ends: list[int] = []
    needed: list[list[int]] = []  # the first and the last microbatch
    digests: list[bytes] = []
    number_of, own = [], 0
    for rollout, microbatch in zip(rollouts, microbatch_of, strict=True):
        end = options.rounded(rollout.first_trained)
        codes = rollout.codes(0, end)
        own += len(rollout) - end
        number = known.setdefault(codes.tobytes(), len(ends))
        if number == len(ends):
            ends.append(end)
            needed.append([microbatch, microbatch])
            digests += _digests(codes, block)
        first, last = needed[number]
        needed[number] = [min(first, microbatch), max(last, microbatch)]
        number_of.append(number)
    firsts, lasts = np.array(needed, np.int64).reshape(-1, 2).T
    found = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
    num_microbatches = max(microbatch_of, default=0) + 1
    lengths = np.array(ends, np.int64)
    return RankBeginnings(lengths, found, firsts, lasts, own, num_microbatches, block), number_of


def _digests(codes: np.ndarray, block: int) -> Iterator[bytes]:
    """Of the first block, of the first two, and so on."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    for start in range(0, len(codes), block):
        digest.update(codes[start : start + block].data)
        yield digest.digest()


def common_spans(
    ranks: Sequence[RankBeginnings],
    rank: int,
    trie: Trie,
    options: TreeOptions,
    num_windows: int = 1,
) -> CommonSpans:
    """What ranks have in common; the same on all of them but for `below`.

    Args:
        ranks: what each of them tells.
        rank: this one.
        trie: makes the prefix tree of codes; here of blocks, whose codes are digests.
        options: see TreeOptions. A span that saves fewer than `min_gain` positions on all ranks
            together is not common.
        num_windows: of the step.
    """
    known, numbers = _different(ranks, num_windows)
    spans: list[CommonSpan] = []
    below = [-1] * len(known)
    tree = trie({number: one.digests for number, one in enumerate(known)}, _BLOCKS)
    todo = [(node, 0, -1) for node in reversed(tree)]
    while todo:
        node, start, parent = todo.pop()
        members = [known[member] for member in node.members]
        of_ranks = tuple(sorted({*itertools.chain(*(one.ranks for one in members))}))
        if len(of_ranks) < 2:
            continue
        end = min(node.end * ranks[rank].block, members[0].length)
        if (len(of_ranks) - 1) * (end - start) >= max(1, options.min_gain):
            first, last = min(one.first for one in members), max(one.last for one in members)
            for begin, stop in itertools.pairwise(_bounds(start, end, options)):
                level = spans[parent].level + 1 if parent >= 0 else 0
                spans.append(CommonSpan(begin, stop, parent, level, of_ranks, first, last))
                parent = len(spans) - 1
            start = end
            for member in node.members:
                below[member] = parent
        todo.extend((child, start, parent) for child in reversed(node.children))
    return CommonSpans(
        rank, tuple(spans), tuple(_segments(spans, _owners(spans, ranks), options.segment_tokens)),
        tuple(below[number] if number >= 0 else -1 for number in numbers[rank]),
        ranks[rank].num_microbatches, num_windows,
    )  # fmt: skip


@dataclass(slots=True)
class _Known:
    """A beginning that one rank has, or several.

    Attributes:
        digests, length: see RankBeginnings.
        ranks: that have it, ascending.
        first, last: the windows in which any of them needs it first and last.
    """

    digests: np.ndarray
    length: int
    ranks: list[int]
    first: int
    last: int


_BLOCKS = TreeOptions()
"""Of a tree whose positions are blocks."""


def _different(
    ranks: Sequence[RankBeginnings], num_windows: int
) -> tuple[list[_Known], list[list[int]]]:
    """All beginnings once, and per rank the numbers of its own; an empty one's is -1."""
    known: list[_Known] = []
    number_of: dict[bytes, int] = {}
    numbers: list[list[int]] = [[] for _ in ranks]
    for place, told in enumerate(ranks):
        named, start = told.digests.tobytes(), 0
        columns = (told.ends(), told.lengths, *_windows_of(told, num_windows))
        for end, length, first, last in zip(*(one.tolist() for one in columns), strict=True):
            if not length:
                numbers[place].append(-1)
                continue
            name = named[_BYTES * (end - 1) : _BYTES * end]
            number = number_of.setdefault(name, len(known))
            if number == len(known):
                known.append(_Known(told.digests[start:end], length, [], first, last))
            one, start = known[number], end
            one.ranks.append(place)
            one.first, one.last = min(one.first, first), max(one.last, last)
            numbers[place].append(number)
    return known, numbers


def _windows_of(told: RankBeginnings, num_windows: int) -> Iterator[np.ndarray]:
    """The first and the last window of each beginning."""
    return (_window(one, told.num_microbatches, num_windows) for one in (told.first, told.last))


def _bounds(start: int, end: int, options: TreeOptions) -> list[int]:
    """Of the chunks of a span, each of which may have another owner."""
    longest = options.rounded(options.chunk_tokens)
    return equal_bounds(start, end, longest, options.boundary) if longest else [start, end]


def _window(microbatch: Any, num_microbatches: int, num_windows: int) -> Any:
    """Of a microbatch, or of an array of them."""
    return microbatch * num_windows // num_microbatches


def _owners(spans: Sequence[CommonSpan], ranks: Sequence[RankBeginnings]) -> list[int]:
    """The rank that computes each span: of those that have it the one with least to compute so
    far; long spans choose first."""
    load = [told.own for told in ranks]
    owners = [0] * len(spans)
    for number in sorted(range(len(spans)), key=lambda n: (spans[n].start - spans[n].end, n)):
        owner = min(spans[number].ranks, key=lambda rank: (load[rank], rank))
        load[owner] += spans[number].end - spans[number].start
        owners[number] = owner
    return owners


def _segments(
    spans: Sequence[CommonSpan], owners: Sequence[int], budget: int
) -> Iterator[CommonSegment]:
    """Spans of one owner, level and pair of windows together; parents cross before children."""
    together: dict[tuple[int, int, int, int], list[int]] = collections.defaultdict(list)
    for number, span in enumerate(spans):
        together[span.first, span.level, span.last, owners[number]].append(number)
    for (first, _, last, owner), numbers in sorted(together.items()):
        numbers.sort(key=lambda number: (spans[number].parent, number))
        lengths = [spans[number].end - spans[number].start for number in numbers]
        for begin, stop in even_parts(lengths, budget):
            yield CommonSegment(owner, tuple(numbers[begin:stop]), first, last)


def tree_of(common: CommonSpans, below: Mapping[int, list[Node]]) -> list[Node]:
    """The roots of one rank's tree: its common spans, and below them what it has for itself.

    Args:
        common: what the rank has in common with others.
        below: by common span (-1: above all of them) the roots of what continues it there.
    """
    children = {number: [*nodes] for number, nodes in below.items()}
    for number in reversed(range(len(common.spans))):  # children first
        span = common.spans[number]
        if common.rank not in span.ranks:
            continue
        under = sorted(children.pop(number), key=lambda child: child.members[0])
        members = sorted({member for child in under for member in child.members})
        node = Node(span.start, span.end, members, under, number)
        children.setdefault(span.parent, []).append(node)
    return sorted(children.get(-1, ()), key=lambda child: child.members[0])
