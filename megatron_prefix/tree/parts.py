"""Cuts a sequence into even parts.  Pure."""

from __future__ import annotations

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
    if not budget:
        return [(0, len(lengths))]
    fewest = len(_parts(lengths, budget))
    low, high = min(-(-sum(lengths) // fewest), budget), budget
    while low < high:
        middle = (low + high) // 2
        if len(_parts(lengths, middle)) > fewest:
            low = middle + 1
        else:
            high = middle
    return _parts(lengths, high)


def _parts(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Parts filled one after the other."""
    bounds, total = [0], 0
    for number, length in enumerate(lengths):
        if total and total + length > budget:
            bounds.append(number)
            total = 0
        total += length
    return [*zip(bounds, [*bounds[1:], len(lengths)], strict=True)]


def equal_bounds(start: int, end: int, longest: int, align: int) -> list[int]:
    """Bounds of the fewest nearly equal chunks, each at most `longest`, multiples of `align`."""
    if end <= start:
        return [start]
    num = -(-(end - start) // longest)
    units = -(-(end - start) // align)
    bounds = [start + align * (units * i // num) for i in range(num)]
    return [*bounds, end]
