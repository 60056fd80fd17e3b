"""Whether segments that are read from a file are a forest as `tree.build` makes it.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.errors import UserError
from megatron_prefix.tree import Place, Segment


def check_segments(segments: Sequence[Segment]) -> None:
    """Checks that segments read from a file are a forest as `tree.build` makes it.

    Raises:
        UserError: names the segment, or a rollout that is in no segment.
    """
    reached: dict[int, Place] = {}  # last span of each rollout so far
    for index, segment in enumerate(segments):
        members = [rollout for span in segment.spans for rollout in span.rollouts]
        fault = "" if segment.spans else "has no span"
        if segment.joined < 0 and len(set(members)) < len(members):
            fault = "has a rollout twice"
        if segment.joined not in (-1, index):
            fault = f"is joined as segment {segment.joined}"
        for number, span in enumerate(segment.spans):
            fault = fault or _span_fault(segments, index, number)
            for rollout in span.rollouts:
                before = reached.get(rollout)
                if not fault and before != span.parent:
                    where = (
                        f"comes from {_sample_name(before)}, not from {_sample_name(span.parent)}"
                    )
                    fault = f"rollout {rollout} {where}"
                reached[rollout] = Place(index, number)
        if fault:
            raise UserError(f"segment {index}: {fault}")
    for rollout in range(max(reached, default=-1)):
        if rollout not in reached:
            raise UserError(f"rollout {rollout} is in no segment")


def _span_fault(segments: Sequence[Segment], index: int, number: int) -> str:
    """What is wrong with one span, not looking at its rollouts."""
    segment, span = segments[index], segments[index].spans[number]
    # A span without rollouts is a filler (plan/joint_forest.py): only padding.
    if not bool(span.rollouts) <= span.length <= span.padded or not span.padded:
        return "a span has no positions, or more than its padded length"
    if segment.waits and span.rollouts and span.length < span.padded:
        return "a span of an inner segment has padding"
    if span.parent is None:
        return f"a root starts at {span.start}, not at 0" if span.start else ""
    where, above = span.parent
    # A segment whose spans continue others of it is read by no other.
    last = number if where == segment.joined else len(segments[where].spans) if where < index else 0
    if above >= last or not segments[where].inner or segments[where].joined not in (-1, index):
        return f"its parent {_sample_name(span.parent)} is not a span of an inner segment before it"
    read = segments[where].spans[above]
    if read.length < read.padded:
        return "a span that another continues has padding"
    begin = read.end
    if span.start != begin:
        return f"a span starts at {span.start}, not at {begin}, where its parent ends"
    return ""


def _sample_name(place: Place | None) -> str:
    return "no span" if place is None else f"span {place.segment}.{place.number}"
