"""Cuts a sequence into even parts.  Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence


def even_parts(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Cuts a sequence into the fewest parts whose sums are at most `budget`, about equally long.

    Args:
        lengths: of the things, above 0; one longer than `budget` is a part of its own.
        budget: 0: no limit.

    Returns:
        (start, stop) of every part.
    """
    if not lengths:
        return []
    ends = [*itertools.accumulate(lengths)]
    if not budget or ends[-1] <= budget:
        return [(0, len(lengths))]
    fewest = len(_parts(ends, budget))
    low, high = min(-(-ends[-1] // fewest), budget), budget
    while low < high:
        middle = (low + high) // 2
        if len(_parts(ends, middle)) > fewest:
            low = middle + 1
        else:
            high = middle
    return _parts(ends, high)


def _parts(ends: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Parts filled one after the other, of things that end there."""
    parts, start, before = [], 0, 0
    while start < len(ends):
        stop = max(start + 1, bisect.bisect(ends, before + budget, start))
        parts.append((start, stop))
        start, before = stop, ends[stop - 1]
    return parts


def equal_bounds(start: int, end: int, longest: int, align: int) -> list[int]:
    """Bounds of the fewest nearly equal chunks, each at most `longest`, multiples of `align`."""
    if end <= start:
        return [start]
    num = -(-(end - start) // longest)
    units = -(-(end - start) // align)
    bounds = [start + align * (units * i // num) for i in range(num)]
    return [*bounds, end]
