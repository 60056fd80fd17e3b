"""What each segment keeps between its forward and its backward.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.tree import Segment


def policies(segments: Sequence[Segment], memory: str) -> tuple[str, ...]:
    """The policy of every segment of a step, or () where all retain.

    Args:
        segments: of the step.
        memory: the policy of inner segments. A wave's backward follows its forward, so there is
            nothing to win, and it retains.
    """
    if memory == "retain":
        return ()
    return tuple(memory if segment.inner else "retain" for segment in segments)
