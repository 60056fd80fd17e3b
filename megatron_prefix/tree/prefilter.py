"""What a step's rollouts share at most, by their first positions alone.  Pure: numpy only.

A tree reads every token. Where hardly two rollouts begin alike a look at their first positions says
so: they are compared at doubling lengths, and a rollout that begins like no other is not looked at
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_prefix.tree.forest import Pairs, TreeOptions

LONGEST_LOOK = 512
"""Rollouts that agree on so many positions may agree on all."""


def most_saved(rollouts: Sequence[Pairs], options: TreeOptions) -> int:
    """An upper bound of the positions that the tree of a step saves; 0: there is no tree.

    A tree of n rollouts joins them in n - 1 places, and each saves the positions up to there. Those
    that agree on `length` positions but not on twice as many are joined in between. A span that
    saves less than `min_gain` is dissolved, so what is joined there saves what it did above.

    Args:
        rollouts: of the step; their routes are not looked at, which can only take sharing away.
        options: of the tree.
    """
    length = options.boundary
    classes, _, saved = _split(rollouts, range(len(rollouts)), length)
    todo = [(members, 0) for members in classes]  # and the bound of spans above
    while todo:
        is_last, lower = 2 * length > max(LONGEST_LOOK, options.boundary), []
        for members, above in todo:
            if is_last:
                lengths = [len(rollouts[member]) for member in members]
                saved += sum(lengths) - max(lengths)
                continue
            end = 2 * length - options.boundary
            if (len(members) - 1) * end < options.min_gain:
                end = above
            parts, num_different, copies = _split(rollouts, members, 2 * length)
            saved += copies + (num_different - 1) * end
            lower += [(part, end) for part in parts]
        todo, length = lower, 2 * length
    return saved


def _split(
    rollouts: Sequence[Pairs], members: Sequence[int], length: int
) -> tuple[list[list[int]], int, int]:
    """Those that agree on their first positions.

    Args:
        rollouts: of the step.
        members: some of them.
        length: positions to compare; shorter rollouts agree only with equal ones.

    Returns:
        Classes of two and more; the number of all classes; positions that copies of shorter
        rollouts save.
    """
    found: dict[bytes, list[int]] = {}
    for member in members:
        one = rollouts[member]
        inputs, labels = (
            column[:length].astype(np.int64, copy=False) for column in (one.inputs, one.labels)
        )
        found.setdefault(inputs.tobytes() + labels.tobytes(), []).append(member)
    saved, classes = 0, []
    for alike in found.values():
        if len(alike) > 1 and len(rollouts[alike[0]]) < length:
            saved += (len(alike) - 1) * len(rollouts[alike[0]])
        elif len(alike) > 1:
            classes.append(alike)
    return classes, len(found), saved
