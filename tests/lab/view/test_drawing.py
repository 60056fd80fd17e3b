"""Pictures of timelines, well-formed, complete and within their frame; and Chrome's traces."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.lab.view import drawing, svg
from megatron_prefix.lab.view.drawing import job_svg, timeline_svg
from megatron_prefix.lab.view.trace import chrome_trace, job_trace
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.tree import TreeOptions, build
from tests.harness.joint_jobs import crossing_job
from tests.harness.trees import flat_rollouts, interleaved, random_forest, ruled_plan

_NAMESPACE = "{http://www.w3.org/2000/svg}"


def forest_of(prefix=1000, suffix=200, num=4, num_groups=2, **options):
    rollouts, groups = flat_rollouts(prefix, suffix, num, num_groups)
    return build(rollouts, groups, TreeOptions(**{"min_gain": 0, "segment_tokens": 400, **options}))


def drawn(plan, title="", unit="tokens", **changes):
    timeline = replace(simulate(plan, **changes), unit=unit)
    text = timeline_svg(timeline, plan, title)
    assert text == timeline_svg(replace(simulate(plan, **changes), unit=unit), plan, title)
    return ElementTree.fromstring(text)


def shapes(picture, name):
    return picture.findall(f".//{_NAMESPACE}{name}")


def tips(picture):
    return [title.text or "" for title in shapes(picture, "title")]


def texts(picture):
    return [text.text or "" for text in shapes(picture, "text")]


def box(rect):
    """x, y, width, height."""
    return tuple(float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))


def extent(text):
    """Left and right end of a text, by the width the drawing reckons with."""
    width = svg.CHARACTER * float(text.get("font-size", 0)) * len(text.text or "")
    x = float(text.get("x", 0))
    left = {"start": x, "middle": x - width / 2, "end": x - width}[text.get("text-anchor", "start")]
    return left, left + width


PLANS = {
    "one rank, few actions": ruled_plan(forest_of(num=2, num_groups=1), 1),
    "four ranks": ruled_plan(forest_of(chunk_tokens=200), 4),
    "eight ranks, 500 actions": ruled_plan(forest_of(num=7, num_groups=4, segment_tokens=200), 8),
    "trees with levels": ruled_plan(random_forest(random.Random(2), depth=4), 3),
    "small groups, packed": ruled_plan(forest_of(prefix=30, suffix=20, num=3, num_groups=6), 2),
    "virtual stages": interleaved(forest_of(num=2), 2, 2),
    "many rollouts": ruled_plan(forest_of(num=150, num_groups=3, segment_tokens=0), 2),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_every_action_is_drawn_once_and_labels_fit(plan):
    picture = drawn(plan)
    check(picture)
    wanted = Counter(str(action) for program in plan.programs for action in program)
    found = Counter(tip.partition(":")[0] for tip in tips(picture) if not tip.startswith("segment"))
    assert found == wanted


def test_a_long_step_is_summed_up_and_its_beginning_is_drawn(monkeypatch):
    """The summary's columns are as full as the stage is busy."""
    monkeypatch.setattr(drawing, "MOST_CELLS", 20)
    plan = ruled_plan(forest_of(num=4, num_groups=8), 3)
    timeline, picture = simulate(plan), drawn(plan)
    check(picture)
    cells = [tip for tip in tips(picture) if not tip.startswith("segment")]
    assert 20 <= len(cells) < 30 < timeline.num_actions
    sizes = [box(rect)[2:] for rect in shapes(picture, "rect")]
    area = sum(width * height for width, height in sizes if 2.4 < width < 2.5)
    assert area / (986 * 36) == pytest.approx(timeline.busy[0] / timeline.makespan, rel=0.01)


def check(picture):
    """All is within the frame, no texts overlap, and labels of boxes are in them."""
    check_labels(picture)
    width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
    for rect in shapes(picture, "rect"):
        x, y, w, h = box(rect)
        assert w > 0 and h > 0
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    taken = []
    for text in shapes(picture, "text"):
        left, right = extent(text)
        y, size = float(text.get("y", 0)), float(text.get("font-size", 0))
        assert 0 <= left <= right <= width
        assert 8 <= size <= y <= height - 2
        taken.append((y - 0.75 * size, y + 0.2 * size, left, right))
    # By height, so that only texts of the same line or the next are compared.
    taken.sort()
    for index, (_, bottom, left, right) in enumerate(taken):
        for top, _, other_left, other_right in itertools.takewhile(
            lambda other, bottom=bottom: other[0] < bottom, taken[index + 1 :]
        ):
            assert right <= other_left + 0.5 or other_right <= left + 0.5, top


def test_ranks_of_a_job_are_drawn_with_their_messages():
    job = crossing_job()
    timeline = job.timeline(messages=(0.5, 1.0))
    text = job_svg(timeline, job.plans, "a job")
    assert text == job_svg(timeline, job.plans, "a job")
    picture = ElementTree.fromstring(text)
    found = Counter(tip.partition(":")[0] for tip in tips(picture))
    assert found == Counter(str(action) for plan in job.plans for action in plan.programs[0])
    check(picture)
    words = texts(picture)
    assert {"a job", "rank 0", "rank 1", "message: payload", "message: gradients"} <= {*words}
    assert "2 data-parallel ranks  ·  18 segments  ·  12 messages" in "\n".join(words)
    # A message has the colour of what it is at both of its ends, below the actions of its row.
    colours = {"payload": "#2f8f5b", "gradients": "#8a5fbf"}
    lowest = {"S": 0.0, "F": 0.0}
    for rect in shapes(picture, "rect"):
        for title in rect:
            tip = title.text or ""
            kind = "payload" if "payload" in tip else "gradients"
            assert (rect.get("fill") == colours[kind]) == (tip[0] in "SR")
            if tip[0] in lowest:
                lowest[tip[0]] = max(lowest[tip[0]], float(rect.get("y", 0)))
    assert lowest["S"] > lowest["F"]
    assert sum("message: payload" in tip for tip in tips(picture)) == 12


def check_labels(picture):
    boxes = [box(rect) for rect in shapes(picture, "rect")]
    for text in shapes(picture, "text"):
        if text.get("pointer-events") != "none":
            continue
        left, right = extent(text)
        y, size = float(text.get("y", 0)), float(text.get("font-size", 0))
        assert any(
            bx - 0.01 <= left and right <= bx + bw + 0.01 and by <= y - size * 0.72 and y <= by + bh
            for bx, by, bw, bh in boxes
        )


def test_places_and_widths_are_times():
    """On one row the boxes of actions lie side by side, each as wide as it is long."""
    plan = ruled_plan(forest_of(num=2, num_groups=1), 2)
    timeline = simulate(plan)
    rects = [
        rect
        for rect in shapes(ElementTree.fromstring(timeline_svg(timeline, plan)), "rect")
        for title in rect
        if not (title.text or "").startswith("segment")
    ]
    width, left = 1200 - 72 - 142, 72
    assert len(rects) == len(timeline.events)
    for rect, event in zip(rects, timeline.events, strict=True):
        scale = width / timeline.makespan
        assert float(rect.get("x", 0)) == pytest.approx(left + event.start * scale, abs=0.01)
        wide = (event.end - event.start) * scale
        assert wide - 1.01 <= float(rect.get("width", 0)) <= wide
    assert len({rect.get("y") for rect in rects}) == 2


def test_tooltips_tell_what_an_action_is():
    forest = forest_of(prefix=100, suffix=20, num=2, num_groups=1, chunk_tokens=50)
    found = tips(drawn(ruled_plan(forest, 1)))
    inner = "F1: inner, 1 span, tree 0\nfrom position 50, 50 tokens, 2 rollouts\n50 to 100 tokens"
    wave = "B2: wave, 2 spans, tree 0\nfrom position 100, up to 20 tokens, 2 rollouts"
    assert inner in found
    assert f"{wave}\n140 to 220 tokens" in found
    assert "segment 0, tree 0\nfrom position 0, 50 tokens\n2 rollouts: 0, 1" in found


def rows_of(trace):
    events = trace["traceEvents"]
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    return names, [one for one in events if one["ph"] == "X"]


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
    names, events = rows_of(trace)
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
    names, events = rows_of(trace)
    assert names == {0: "rank 0", 1: "rank 0, messages", 2: "rank 1", 3: "rank 1, messages"}
    for rank, plan in enumerate(job.plans):
        for row, kinds in ((2 * rank, "FB"), (2 * rank + 1, "SR")):
            wanted = [str(action) for action in plan.programs[0] if action.kind in kinds]
            assert [event["name"] for event in events if event["tid"] == row] == wanted
    (first, *_) = (event for event in events if event["name"].startswith("S"))
    assert first["cat"] == "send, inner" and first["args"]["peer"] == 1
    assert first["dur"] == 1e3 * 0.5 * first["args"]["rows"]
