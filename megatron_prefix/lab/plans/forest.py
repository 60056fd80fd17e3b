"""The forest of a plan from a file.  Pure."""

from __future__ import annotations

from megatron_prefix.plan.actions import Plan
from megatron_prefix.tree import Forest


def forest_of(plan: Plan) -> Forest:
    """The forest of a plan; it does not know which positions are trained."""
    lengths: dict[int, int] = {}
    for segment in plan.segments:
        for span in segment.spans:
            lengths.update(dict.fromkeys(span.rollouts, span.end))
    ends = tuple(lengths[rollout] for rollout in sorted(lengths))
    return Forest(plan.segments, ends, tuple(end - 1 for end in ends))
