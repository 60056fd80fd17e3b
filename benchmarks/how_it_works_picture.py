"""Draws how one small group becomes a plan: python -m benchmarks.how_it_works_picture FILE.

Three parts below each other: rollouts as microbatches hold them, their prefix tree, and what one
GPU runs, in the planner's order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_prefix.lab.plans.timeline import Timeline, simulate
from megatron_prefix.lab.view import svg
from megatron_prefix.lab.view.drawing import GRADIENTS, PAYLOAD, phase_colour
from megatron_prefix.plan.planner import loss_ready_after, make_plan
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build

PROMPT, TURN, ANSWER = 512, 256, 128  # tokens
NAMES = ("prompt", "answers 0, 1", "first turn", "answers 2, 3")
"""Of the segments."""
WIDTH, LEFT, RIGHT, LANE = 720, 84, 16, 19  # pixels
FAINT, SIZE = "#66727f", 12.0


class Arrow(NamedTuple):
    """From one action to another, as (kind, segment)."""

    start: tuple[str, int]
    end: tuple[str, int]
    height: float


READS = (
    Arrow(("F", 0), ("F", 1), 22),
    Arrow(("F", 0), ("F", 2), 44),
    Arrow(("F", 0), ("F", 3), 58),
    Arrow(("F", 2), ("F", 3), 22),
)
SENDS = (
    Arrow(("B", 1), ("B", 0), 58),
    Arrow(("B", 3), ("B", 2), 22),
    Arrow(("B", 3), ("B", 0), 44),
    Arrow(("B", 2), ("B", 0), 22),
)


def group() -> Forest:
    """Four answers to a prompt, two of which share a first turn as well."""
    random = np.random.default_rng(1)
    prompt, turn = random.integers(1000, size=PROMPT), random.integers(1000, size=TURN)
    rollouts = []
    for shared in ([prompt], [prompt], [prompt, turn], [prompt, turn]):
        tokens = np.concatenate([*shared, random.integers(1000, size=ANSWER)]).astype(int)
        rollouts.append(Pairs(tokens[:-1], tokens[1:], np.arange(1, len(tokens)) >= PROMPT))
    return build(rollouts, [0] * len(rollouts), TreeOptions(segment_tokens=2 * ANSWER))


def heading(y: float, title: str, fact: str) -> Iterator[str]:
    """A part's title, and what is said of it at the right."""
    yield svg.text(LEFT, y, title, 13, weight=600)
    yield svg.text(WIDTH - RIGHT, y, fact, SIZE, FAINT, anchor="end")


def box_of(start: int, length: int, top: float, first: int, lanes: int, end: int) -> svg.Box:
    """`length` from `start` of the width's `end`, over `lanes` lanes below `top`."""
    scale = (WIDTH - LEFT - RIGHT) / end
    return svg.Box(LEFT + scale * start, top + LANE * first, scale * length, LANE * lanes)


def microbatches(forest: Forest, top: float, end: int) -> Iterator[str]:
    """A lane per rollout, each with spans of its own."""
    for rollout in range(4):
        middle = top + LANE * rollout + 13
        yield svg.text(LEFT - 10, middle, f"rollout {rollout}", SIZE, anchor="end")
        for index, segment in enumerate(forest.segments):
            for span in segment.spans:
                if rollout in span.rollouts:
                    box = box_of(span.start, span.length, top, rollout, 1, end)
                    name = NAMES[index] if segment.inner else f"answer {rollout}"
                    yield from svg.labelled(box, phase_colour("F", segment.inner, 0), name, "")


def tree(forest: Forest, top: float, end: int) -> Iterator[str]:
    """A box per span, over the lanes of its rollouts."""
    for index, segment in enumerate(forest.segments):
        for span in segment.spans:
            box = box_of(span.start, span.length, top, span.rollouts[0], len(span.rollouts), end)
            name = f"segment {index}: {NAMES[index]}" if segment.inner else f"segment {index}"
            yield from svg.labelled(box, phase_colour("F", segment.inner, 0), name, "")
    for rollout in range(4):
        middle = top + LANE * rollout + 13
        yield svg.text(LEFT - 10, middle, f"rollout {rollout}", SIZE, anchor="end")


def order(forest: Forest, timeline: Timeline, top: float) -> Iterator[str]:
    """A box per action, and arrows for what goes from one to another."""
    height, places = 38.0, {}
    for event in timeline.events:
        start, length = int(event.start), int(event.end - event.start)
        box = box_of(start, length, top, 0, 2, int(timeline.makespan))._replace(height=height)
        action, inner = event.action, forest.segments[event.action.segment].inner
        places[action.kind, action.segment] = box.x + box.width / 2
        colour = phase_colour(action.kind, inner, 0)
        yield from svg.labelled(box, colour, str(action), "")
    for arrows, y, up, colour in (
        (READS, top - 3, -1, PAYLOAD[1]),
        (SENDS, top + height + 3, 1, GRADIENTS[1]),
    ):
        for arrow in arrows:
            ends = places[arrow.start], places[arrow.end]
            yield arc(*ends, y, up * arrow.height, colour)
    yield svg.text(LEFT - 10, top - 22, "K/V", SIZE, PAYLOAD[1], anchor="end", weight=600)
    low = top + height + 34
    yield svg.text(LEFT - 10, low, "gK/gV", SIZE, GRADIENTS[1], anchor="end", weight=600)


def arc(start: float, end: float, y: float, rise: float, colour: str) -> str:
    """An arrow from `start` to `end`, both at height `y`, bent up (`rise` < 0) or down."""
    bend, tip = svg.px(y + rise * 1.3), 5 if rise > 0 else -5
    x, z = svg.px(start), svg.px(end)
    line = f"M{x} {svg.px(y)}C{x} {bend} {z} {bend} {z} {svg.px(y + tip)}"
    head = f"M{svg.px(end - 3.5)} {svg.px(y + tip)}h7L{z} {svg.px(y)}z"
    return (
        f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
        f'<path d="{head}" fill="{colour}"/>'
    )


def legend(y: float) -> Iterator[str]:
    """Colours of the three phases."""
    x = float(LEFT)
    for kind, inner, name in (
        ("F", True, "A: prompts forward"),
        ("F", False, "B: answers forward"),
        ("B", False, "B: answers backward"),
        ("B", True, "C: prompts backward"),
    ):
        yield svg.rect(svg.Box(x, y, 14, 12), phase_colour(kind, inner, 0))
        yield svg.text(x + 19, y + 10.5, name, SIZE)
        x += 156


def picture() -> str:
    """The SVG document."""
    forest = group()
    plan = make_plan(forest, 1)
    timeline = simulate(plan, ready_after=loss_ready_after(forest))
    end = max(span.end for segment in forest.segments for span in segment.spans)
    raw, executed = f"{forest.raw_tokens:,} positions", f"{forest.executed_tokens:,} positions"
    body = [
        *heading(24, "1. Microbatches: every rollout brings its prompt", raw),
        *microbatches(forest, 34, end),
        *heading(146, "2. Prefix tree: every shared span once", executed),
        *tree(forest, 156, end),
        *heading(
            268, "3. One GPU, from left to right", "F: forward, B: backward, with the segment"
        ),
        *order(forest, timeline, 348),
        *legend(462),
    ]
    return svg.document(WIDTH, 488, body)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
