"""Spans that rollouts on several data-parallel ranks have in common.  Pure: numpy only.

Trainers deal the rollouts of a prompt to several ranks. What they begin with runs once in the whole
job: on an *owner*, one of the ranks that have it, which sends its payload to the others and gets
their gradients back. All ranks know digests of the beginnings of all, and each comes to the same
answer: the common spans, their owners, the segments that they are in, and when they cross. From the
first position that carries loss on, final hidden states cross, too: every rank has losses of its
own on them.

Segments cross when a step begins, and their gradients when it ends. In this order, the same on all
ranks, no exchange waits for a later one: a span's parents cross before it, their gradients after
its own.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_prefix.features.across.block_tree import BlockTree, RankBeginnings, block_tree
from megatron_prefix.features.across.common_spans import CommonSegment, CommonSpan, CommonSpans
from megatron_prefix.features.across.owners import owners_of
from megatron_prefix.tree.forest import LEAST_SHARE, Pairs, TreeOptions
from megatron_prefix.tree.nodes import equal_bounds, even_parts

_BYTES = 16
BLOCK = 8
"""Positions between two digests of a beginning, each of 16 bytes: beginnings that branch inside a
block have only what is before it in common. Blocks of 1 lose nothing and send as much as tokens:
they are for `min_gain` 0, which gives nothing up."""


def beginnings_of(
    rollouts: Sequence[Pairs], options: TreeOptions, block: int | None = None
) -> tuple[RankBeginnings, list[int]]:
    """What a rank begins with, and per rollout the number of its beginning.

    Args:
        rollouts: of the step, on this rank.
        options: see TreeOptions; beginnings end at a multiple of the boundary.
        block: positions between digests, rounded up to such a multiple; default: see BLOCK.
    """
    block = block or (BLOCK if options.min_gain else 1)
    block = -(-block // options.boundary) * options.boundary
    known: dict[bytes, int] = {}
    ends: list[np.ndarray] = []
    trained_at: list[int] = []
    digests: list[bytes] = []
    number_of, own = [], 0
    for rollout in rollouts:
        trained = rollout.first_trained
        end = options.rounded(trained if options.loss_in_leaves else rollout.num_needed - 1)
        codes = rollout.codes(0, end)
        own += rollout.num_needed - end
        number = known.setdefault(codes.tobytes(), len(ends))
        if number == len(ends):
            ends.append(np.minimum(np.arange(block, end + block, block), end))
            trained_at.append(end)
            digests += _digests(codes, block)
        trained_at[number] = min(trained_at[number], trained)
        number_of.append(number)
    halves = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
    counts, first_trained = np.array([*map(len, ends)], np.int64), np.array(trained_at, np.int64)
    upto = np.concatenate([np.zeros(0, np.int64), *ends])
    positions = own + sum(int(of[-1]) for of in ends if len(of))
    return RankBeginnings(counts, halves, upto, first_trained, own, positions), number_of


def _digests(codes: np.ndarray, block: int) -> Iterator[bytes]:
    """Of the first block, of the first two, and so on."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    for start in range(0, len(codes), block):
        digest.update(codes[start : start + block].data)
        yield digest.digest()


def common_spans(ranks: Sequence[RankBeginnings], rank: int, options: TreeOptions) -> CommonSpans:
    """What ranks have in common; the same on all of them but for `below`.

    Args:
        ranks: what each of them tells; see ranges.py.
        rank: this one.
        options: see TreeOptions. A span that saves fewer than `min_gain` positions on all ranks
            together is not common, nor are those of a segment that saves fewer than `segment_gain`.
    """
    tree = block_tree(ranks)
    load = [told.own for told in ranks]
    shared = _spans(tree, options)
    shared = _worthwhile(shared, load, ranks, options)
    if options.chunk_tokens:
        shared = _recut(shared, options.boundary, options.rounded(options.chunk_tokens))
    return CommonSpans(
        rank, tuple(shared.spans), tuple(_segments(shared.spans, load, options.segment_tokens)),
        tuple(shared.below[node] if node >= 0 else -1 for node in tree.below[rank].tolist()),
    )  # fmt: skip


class _SpanTable(NamedTuple):
    """Common spans, parents before children, and the last one of every node of the tree."""

    spans: list[CommonSpan]
    below: list[int]


def _spans(tree: BlockTree, options: TreeOptions) -> _SpanTable:
    """Those that save at least `min_gain` positions on all ranks together."""
    shared = _SpanTable([], [-1] * len(tree.start))
    todo = [(node, 0, -1, 0) for node in reversed(tree.children[-1])]
    boundary, gain = options.boundary, max(1, options.min_gain)
    while todo:
        node, start, parent, depth = todo.pop()
        ranks, least = tree.ranks[node], gain / (len(tree.ranks[node]) - 1)
        last = tree.end[node]
        cut = tree.first_trained[node] // boundary * boundary
        # Where positions first carry loss a span ends.
        pieces = [(min(cut, last), False)] if cut > tree.start[node] else []
        for end, scored in [*pieces, (last, True)] if cut < last else pieces:
            if end - start >= least:
                shared.spans.append(CommonSpan(start, end, parent, depth, ranks, scored))
                start, parent, depth = end, len(shared.spans) - 1, depth + 1
        shared.below[node] = parent
        todo += [(child, start, parent, depth) for child in reversed(tree.children[node])]
    return shared


def _worthwhile(
    shared: _SpanTable, load: Sequence[int], ranks: Sequence[RankBeginnings], options: TreeOptions
) -> _SpanTable:
    """Without the spans of segments that save too little, see `TreeOptions.segment_gain`; what
    continues them then begins where they began.
    """
    positions = sum(rank.positions for rank in ranks) // len(ranks)
    least = min(options.segment_gain, positions // LEAST_SHARE)
    while least:
        spans = shared.spans
        segments = _segments(spans, load, options.segment_tokens)
        weak = [
            segment.spans
            for segment in segments
            if sum(spans[n].saved for n in segment.spans) < least
        ]
        if not weak:
            break
        shared = _recut(shared, options.boundary, dropped={*itertools.chain(*weak)})
    return shared


def _recut(
    shared: _SpanTable, boundary: int, longest: int = 0, dropped: Container[int] = ()
) -> _SpanTable:
    """Long spans as chains of chunks, each of which may have another owner, and without some: what
    continues such a span begins where it began. `longest`: most positions of a chunk; 0: any."""
    spans: list[CommonSpan] = []
    moved: list[int] = []  # the last one that a span has become
    ends: list[int] = []  # where what continues it begins
    for number, span in enumerate(shared.spans):
        parent, begin = (-1, 0) if span.parent < 0 else (moved[span.parent], ends[span.parent])
        bounds = [begin] if number in dropped else [begin, span.end]
        if number not in dropped and 0 < longest < span.end - begin:
            bounds = equal_bounds(begin, span.end, longest, boundary)
        for start, end in itertools.pairwise(bounds):
            depth = spans[parent].depth + 1 if parent >= 0 else 0
            spans.append(CommonSpan(start, end, parent, depth, span.ranks, span.scored))
            parent = len(spans) - 1
        moved.append(parent)
        ends.append(bounds[-1])
    return _SpanTable(spans, [moved[number] if number >= 0 else -1 for number in shared.below])


def _segments(
    spans: Sequence[CommonSpan], load: Sequence[int], budget: int
) -> Iterator[CommonSegment]:
    """Spans of one owner (owners.py) and depth together, those with loss apart from others; parents
    cross before children. `load`: positions that every rank computes besides."""
    lengths_of = [span.end - span.start for span in spans]
    parents = [span.parent for span in spans]
    owners = owners_of(lengths_of, [span.ranks for span in spans], load)
    together: dict[tuple[int, int, bool], list[int]] = collections.defaultdict(list)
    for number, span in enumerate(spans):
        together[span.depth, owners[number], span.scored].append(number)
    for (_, owner, _), numbers in sorted(together.items()):
        numbers.sort(key=parents.__getitem__)  # stable
        lengths = [lengths_of[number] for number in numbers]
        for begin, stop in even_parts(lengths, budget):
            yield CommonSegment(owner, tuple(numbers[begin:stop]))
