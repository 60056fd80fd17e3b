"""A timeline in Chrome's trace format, which Perfetto and chrome://tracing open.  Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_prefix.lab.plans.forest import trees
from megatron_prefix.lab.plans.job import JobTimeline
from megatron_prefix.lab.plans.timeline import Event, Timeline
from megatron_prefix.plan.actions import Plan
from megatron_prefix.tree import Segment

_KINDS = {"F": "forward", "B": "backward", "S": "send", "R": "receive"}


def chrome_trace(timeline: Timeline, plan: Plan) -> str:
    """The timeline as JSON text: one row per rank, one complete event per action.

    Times are in microseconds ("Trace Event Format", sections "Complete Events" and "Metadata
    Events"); a simulated timeline's tokens are written as milliseconds.
    """
    name, ranks = "stage" if plan.num_chunks == 1 else "rank", range(plan.num_ranks)
    tree_of = trees(plan.segments)
    events = [_event(event, event.rank, plan.segments, tree_of) for event in timeline.events]
    return _text(timeline.unit, [f"{name} {rank}" for rank in ranks], events)


def job_trace(job: JobTimeline, plans: Sequence[Plan], unit: str = "tokens") -> str:
    """The same for data-parallel ranks that share prompts: two rows per rank, of which the second
    has its messages, from when they begin to cross.

    Args:
        job: simulated.
        plans: of all ranks.
        unit: of its times.
    """
    names = [f"rank {rank}{what}" for rank in range(len(plans)) for what in ("", ", messages")]
    tree_of = [trees(plan.segments) for plan in plans]
    events = [
        _event(
            event, 2 * event.rank + (event.action.peer >= 0), plans[event.rank].segments,
            tree_of[event.rank],
        )
        for event in job.events
    ]  # fmt: skip
    return _text(unit, names, events)


def _event(
    event: Event, row: int, segments: Sequence[Segment], tree_of: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """One complete event."""
    _, action, start, end = event
    segment = segments[action.segment]
    what = "inner" if segment.inner else "wave"
    peer = {"peer": action.peer} if action.peer >= 0 else {}
    return {
        "name": str(action), "cat": f"{_KINDS[action.kind]}, {what}", "ph": "X",
        "pid": 0, "tid": row, "ts": _microseconds(start), "dur": _microseconds(end - start),
        "args": {
            "segment": action.segment, "chunk": action.chunk,
            "trees": sorted({*tree_of[action.segment]}), "rows": segment.padded_length, **peer,
        },
    }  # fmt: skip


def _text(unit: str, names: Sequence[str], events: Sequence[dict[str, Any]]) -> str:
    """All of it, with the names of rows."""
    rows = [_named("thread_name", row, name) for row, name in enumerate(names)]
    every = [_named("process_name", 0, unit), *rows, *events]
    return json.dumps({"traceEvents": every, "displayTimeUnit": "ms"}, indent=0) + "\n"


def _named(kind: str, rank: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}


def _microseconds(milliseconds: float) -> float:
    return round(1e3 * milliseconds, 3)
