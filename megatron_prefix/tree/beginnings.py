"""An upper bound of what the tree of a step saves, from first positions alone.  Pure: numpy only.

Building a tree reads every position; comparing the first ones, at growing lengths, is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_prefix.tree.forest import Pairs, TreeOptions, pair_codes

LONGEST_LOOK = 512
"""Rollouts that agree on so many positions may agree on all."""


def most_saved(rollouts: Sequence[Pairs], options: TreeOptions, enough: float = math.inf) -> int:
    """An upper bound of the positions that the tree of a step saves; 0: there is no tree.

    Rollouts are compared at doubling lengths, and one that begins like no other is dropped. A tree
    of n rollouts joins them in n - 1 places, and each saves the positions up to there. Rollouts
    that agree on `length` positions but not on twice as many are joined in between. A span that
    saves less than `min_gain` is dissolved: there only the positions above it count.

    Args:
        rollouts: of the step; routes are ignored, as they can only prevent sharing.
        enough: stop as soon as the bound cannot fall below this.
    """
    length = options.boundary
    longest = max(LONGEST_LOOK, length)
    beginnings = _Beginnings(rollouts, longest)
    classes, _, saved = beginnings.split(range(len(rollouts)), 0, length)
    todo = [(members, 0) for members in classes]  # and the bound of spans above
    while todo and saved + sum((len(members) - 1) * above for members, above in todo) < enough:
        is_last, lower = 2 * length > longest, []
        for members, above in todo:
            if is_last:
                sizes = [len(rollouts[member]) for member in members]
                saved += sum(sizes) - max(sizes)
                continue
            end = 2 * length - options.boundary
            if (len(members) - 1) * end < options.min_gain:
                end = above
            parts, num_different, copies = beginnings.split(members, length, 2 * length)
            saved += copies + (num_different - 1) * end
            lower += [(part, end) for part in parts]
        todo, length = lower, 2 * length
    return saved + sum((len(members) - 1) * above for members, above in todo)


class _Beginnings:
    """Input and label of the first `longest` positions of rollouts, as bytes."""

    def __init__(self, rollouts: Sequence[Pairs], longest: int) -> None:
        self._sizes = [len(rollout) for rollout in rollouts]
        ends = [min(size, longest) for size in self._sizes]
        self._codes = [codes.tobytes() for codes in pair_codes(rollouts, 0, ends)]

    def split(
        self, members: Sequence[int], start: int, length: int
    ) -> tuple[list[list[int]], int, int]:
        """Classes of rollouts that agree on their first positions.

        Args:
            members: rollouts that agree up to `start`, a position of all of them.
            start: first position to compare.
            length: positions to compare; shorter rollouts agree only with equal ones.

        Returns:
            Classes of two and more; the number of all classes; positions saved by copies of
            rollouts shorter than `length`.
        """
        by_codes: dict[bytes, list[int]] = {}
        for member in members:
            prefix = self._codes[member][8 * start : 8 * length]
            by_codes.setdefault(prefix, []).append(member)
        saved, classes = 0, []
        for alike in by_codes.values():
            if len(alike) > 1 and self._sizes[alike[0]] < length:
                saved += (len(alike) - 1) * self._sizes[alike[0]]
            elif len(alike) > 1:
                classes.append(alike)
        return classes, len(by_codes), saved
