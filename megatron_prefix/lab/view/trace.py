"""A timeline in Chrome's trace format, which Perfetto and chrome://tracing open.  Pure."""

from __future__ import annotations

import json
from typing import Any

from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.simulator import Timeline
from megatron_prefix.tree import trees

_KINDS = {"F": "forward", "B": "backward"}


def chrome_trace(timeline: Timeline, plan: Plan) -> str:
    """The timeline as JSON text: one row per rank, one complete event per action.

    Times are in microseconds ("Trace Event Format", sections "Complete Events" and "Metadata
    Events"); a simulated timeline's tokens are written as milliseconds.
    """
    events: list[dict[str, Any]] = [_named("process_name", 0, timeline.unit)]
    name = "stage" if plan.num_chunks == 1 else "rank"
    events += [_named("thread_name", rank, f"{name} {rank}") for rank in range(plan.num_ranks)]
    tree_of = trees(plan.segments)
    for rank, action, start, end in timeline.events:
        segment = plan.segments[action.segment]
        what = "inner" if segment.inner else "wave"
        events.append(
            {
                "name": str(action), "cat": f"{_KINDS[action.kind]}, {what}", "ph": "X",
                "pid": 0, "tid": rank, "ts": _microseconds(start),
                "dur": _microseconds(end - start),
                "args": {
                    "segment": action.segment, "chunk": action.chunk,
                    "trees": sorted({*tree_of[action.segment]}),
                    "rows": segment.padded_length,
                },
            }
        )  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0) + "\n"


def _named(kind: str, rank: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}


def _microseconds(milliseconds: float) -> float:
    return round(1e3 * milliseconds, 3)
