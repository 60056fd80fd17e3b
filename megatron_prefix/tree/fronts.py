"""Short ancestors in front of a segment's own keys.  Pure.

Each level of ancestors (payload_map.py) takes a call of the kernel of its own, and a merge. Where
ancestors are short, as system prompts and questions are, such calls cost more than what they
compute. Then copies of their keys precede those of every span that sees them, and one causal call
does for all: a mask from the bottom right shows a query what it sees in a whole rollout.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from megatron_prefix.tree.payload_map import Level, Run
from megatron_prefix.tree.views import PIECE_KEYS

MOST_COPIES = 1.0
"""Copies of keys at most, of a segment's own keys: they, and their gradients, take memory. So there
are no more than PIECE_KEYS in any case."""


class Front(NamedTuple):
    """What precedes the own keys of a segment's spans.

    Attributes:
        levels: numbers of the levels that do.
        rows: disjoint intervals of the arena: their keys.
        spans: per span the intervals of its keys among these rows.
    """

    levels: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]


def front_of(levels: Sequence[Level], lengths: Sequence[int]) -> Front | None:
    """The levels with fewest copies, as long as these are few enough in all; None: not one.

    Args:
        levels: of a segment.
        lengths: of its spans, padding included, on the only context-parallel rank.
    """
    starts = [*itertools.accumulate(lengths, initial=0)]
    copies = [sum(len(_spans(run, starts)) * (run.end - run.start) for run in level.runs)
              for level in levels]  # fmt: skip
    chosen, total = list[int](), 0
    for number in sorted(range(len(levels)), key=copies.__getitem__):
        total += copies[number]
        if total <= min(MOST_COPIES * starts[-1], PIECE_KEYS):
            chosen.append(number)
    rows, at = list[tuple[int, int]](), 0
    spans: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for run in itertools.chain.from_iterable(levels[number].runs for number in sorted(chosen)):
        rows.append((run.start, run.end))
        for number in _spans(run, starts):
            spans[number].append((at, at + run.end - run.start))
        at += run.end - run.start
    return Front(tuple(sorted(chosen)), tuple(rows), tuple(map(tuple, spans))) if chosen else None


def _spans(run: Run, starts: Sequence[int]) -> range:
    """Those whose queries a run has: all queries of a span have the same ancestors."""
    return range(bisect.bisect_left(starts, run.first), bisect.bisect_left(starts, run.stop))
