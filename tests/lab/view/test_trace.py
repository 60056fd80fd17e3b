"""Timelines in Chrome's trace format."""

import json

import pytest

from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.lab.view.trace import chrome_trace, job_trace
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.tree import TreeOptions, build
from tests.harness.jobs import crossing_job
from tests.harness.trees import flat_rollouts


@pytest.mark.parametrize(
    ("budget", "most"), [(16, 1), (256, 2)], ids=["a tree a segment", "both trees in a segment"]
)
def test_every_action_is_one_event(budget, most):
    options = TreeOptions(segment_tokens=budget, chunk_tokens=32)
    forest = build(*flat_rollouts(64, 16, 3, 2), options)
    tree_of_rollout = [0] * 3 + [1] * 3
    plan = make_plan(forest, 2, num_chunks=2)
    timeline = simulate(plan)
    trace = json.loads(chrome_trace(timeline, plan))
    assert trace["displayTimeUnit"] == "ms"
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert names == {0: "rank 0", 1: "rank 1"}
    found = [[event["name"] for event in events if event["tid"] == rank] for rank in (0, 1)]
    assert found == [[str(action) for action in program] for program in plan.programs]
    assert {event["pid"] for event in events} == {0}
    assert len({event["cat"] for event in events}) == 4
    for event, (_, action, _, _) in zip(events, timeline.events, strict=True):
        segment = plan.segments[action.segment]
        assert event["args"] == {
            "segment": action.segment,
            "chunk": action.chunk,
            "trees": sorted({tree_of_rollout[r] for s in segment.spans for r in s.rollouts}),
            "rows": segment.padded_length,
        }
    assert max(len(event["args"]["trees"]) for event in events) == most


def test_messages_of_ranks_have_rows_of_their_own():
    job = crossing_job()
    timeline = job.timeline(messages=(0.5, 1.0))
    trace = json.loads(job_trace(timeline, job.plans))
    names = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert names == {0: "rank 0", 1: "rank 0, messages", 2: "rank 1", 3: "rank 1, messages"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank, plan in enumerate(job.plans):
        for row, kinds in ((2 * rank, "FB"), (2 * rank + 1, "SR")):
            wanted = [str(action) for action in plan.programs[0] if action.kind in kinds]
            assert [event["name"] for event in events if event["tid"] == row] == wanted
    (first, *_) = (event for event in events if event["name"].startswith("S"))
    assert first["cat"] == "send, inner" and first["args"]["peer"] == 1
    assert first["dur"] == 1e3 * 0.5 * first["args"]["rows"]
