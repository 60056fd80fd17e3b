"""Draws a timeline and its trees as SVG.  Pure; the same input gives the same bytes.

One row per rank and one box per action: forward blue, backward orange, inner segments dark, waves
light, each tree with another hue; grey where a rank waits. The trees are below: positions from left
to right, one lane per rollout, so a box over several lanes is shared by these rollouts. Rows of
data-parallel ranks that exchange have a lane of messages, from when they begin to cross. Of more
than MOST_CELLS actions the picture has one stage's summary, and a window of all stages.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence

from megatron_prefix.lab.plans.forest import num_trees, trees
from megatron_prefix.lab.plans.job import JobTimeline
from megatron_prefix.lab.plans.timeline import Event, Timeline
from megatron_prefix.lab.view import svg
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.tree import Segment, Span

# Widths and heights, in pixels.
_WIDTH, _LEFT, _RIGHT = 1200, 72, 142
_TOP = 118  # of the first row; header and legend stand above
_GAP = 6  # between rows
_LANE = 14  # of a rollout, in which its segment's number fits
_MOST_LANES, _TREES_HEIGHT = 96, 28 * _LANE

MOST_CELLS = 5000
"""Boxes in rows of ranks. Of a longer timeline the first rank's row is summed up in columns, and of
all rows only the first actions are drawn."""
_COLUMNS = 400

_FAINT, _BUBBLE, _LINE = "#66727f", "#e8ebef", "#c9d0d8"
# (kind, inner): phase and name, (hue in degrees, lightness, saturation)
_PHASES = {
    ("F", True): ("A: forward, inner", (212, 0.40, 0.62)),
    ("F", False): ("B: forward, wave", (208, 0.74, 0.66)),
    ("B", False): ("B: backward, wave", (34, 0.72, 0.88)),
    ("B", True): ("C: backward, inner", (18, 0.46, 0.74)),
}
PAYLOAD, GRADIENTS = ("message: payload", "#2f8f5b"), ("message: gradients", "#8a5fbf")
_HUE_SHIFTS = (0, -22, 18)  # of a tree against the one before
_UNITS = {
    "tokens": "tokens of forward work (a backward counts double)",
    "ms": "milliseconds",
}


def timeline_svg(timeline: Timeline, plan: Plan, title: str = "", width: float = _WIDTH) -> str:
    """Draws a timeline.

    Args:
        timeline: simulated or measured.
        plan: what ran.
        title: the heading; default: the size of the plan.
        width: of the picture, in pixels.

    Returns:
        A whole SVG document.
    """
    row = 36 if plan.num_ranks <= 4 else 30 if plan.num_ranks <= 8 else 20
    legend, legend_height = _legend(76, _note(plan), width)
    top, end, summary = _TOP + legend_height, timeline.makespan, list[str]()
    if timeline.num_actions > MOST_CELLS:
        end = sorted(event.start for event in timeline.events)[MOST_CELLS]
        summary = [*_summary(timeline, plan, svg.Box(0, top, width, row), end)]
        top += row + 72
    bottom = top + plan.num_ranks * (row + _GAP)
    trees_top = bottom + 64
    trees, trees_height = _trees(plan.segments, trees_top, width)
    facts = (
        _counted(plan.num_stages, "stage"),
        f"{_counted(len(plan.segments), 'segment')}"
        f" in {_counted(num_trees(plan.segments), 'tree')}",
        _counted(timeline.num_actions, "action"),
        *_sizes(timeline, "live tokens"),
    )
    height = trees_top + trees_height + 44
    body = [
        *_header(title or f"Prefix schedule, {_counted(plan.num_stages, 'stage')}", facts),
        *legend,
        *summary,
        *_rows(timeline, [plan] * plan.num_ranks, row, top, end, width=width),
        *_axis(0, end, bottom, _UNITS.get(timeline.unit, timeline.unit), width),
        *trees,
    ]
    return svg.document(width, height, body)


def job_svg(job: JobTimeline, plans: Sequence[Plan], title: str) -> str:
    """Draws data-parallel ranks that share prompts, one row each, with their messages.

    Args:
        job: simulated, in tokens.
        plans: of all ranks.
        title: the heading.

    Returns:
        A whole SVG document.
    """
    timeline = job.of_ranks()
    row = 36 if len(plans) <= 8 else 24
    bottom = _TOP + len(plans) * (row + _GAP)
    num_messages = sum(event.action.kind == "S" for event in job.events)
    facts = (
        _counted(len(plans), "data-parallel rank"),
        _counted(sum(len(plan.segments) for plan in plans), "segment"),
        _counted(num_messages, "message"),
        *_sizes(timeline, "received tokens"),
    )
    body = [
        *_header(title, facts),
        *_legend(76)[0],
        *_rows(timeline, plans, row, _TOP, timeline.makespan),
        *_axis(0, timeline.makespan, bottom, _UNITS[timeline.unit]),
    ]
    return svg.document(_WIDTH, bottom + 44, body)


def comparison_svg(
    runs: Sequence[tuple[str, Timeline, Plan]], title: str, width: float = _WIDTH
) -> str:
    """Draws several timelines of one step below each other, with one scale of time.

    Args:
        runs: name, timeline and plan of each, from the top.
        title: the heading.
        width: of the picture, in pixels.

    Returns:
        A whole SVG document.
    """
    end = max(timeline.makespan for _, timeline, _ in runs)
    legend, legend_height = _legend(52, _note(runs[0][2]), width)
    body = [svg.text(24, 34, title, 18, weight=600), *legend]
    top, row = 74 + legend_height, 18
    for name, timeline, plan in runs:
        body.append(svg.text(_LEFT, top + 20, name, 13, weight=600))
        after = _LEFT + 13 * svg.CHARACTER * len(name) + 24
        body.append(svg.text(after, top + 20, f"makespan {_short(timeline.makespan)}", 12, _FAINT))
        rows = [plan] * plan.num_ranks
        body.extend(_rows(timeline, rows, row, top + 28, end, tips=False, width=width))
        top += 28 + plan.num_ranks * (row + _GAP) + 6
    unit = runs[0][1].unit
    body.extend(_axis(0, end, top, _UNITS.get(unit, unit), width))
    return svg.document(width, top + 46, body)


# Parts of the picture -----------------------------------------------------------------------------


def _header(title: str, facts: Sequence[str]) -> Iterator[str]:
    yield svg.text(24, 34, title, 18, weight=600)
    yield svg.text(24, 56, "  ·  ".join(facts), 13, _FAINT)


def _sizes(timeline: Timeline, peak_of: str) -> Iterator[str]:
    yield f"makespan {_short(timeline.makespan)} {timeline.unit}"
    yield f"bubble {100 * timeline.bubble_fraction:.1f}%"
    yield f"peak {_short(timeline.peak_live_positions)} {peak_of}"


def _note(plan: Plan) -> str:
    more = "; bar: model chunk 1 up" if plan.num_chunks > 1 else ""
    return f"hue: the (first) tree{more}"


def _legend(y: float, note: str = "", width: float = _WIDTH) -> tuple[list[str], float]:
    """What colours mean, and a note; without one, the colours of messages. Then by how much the
    legend is higher than one line."""
    entries: list[tuple[str, list[str]]] = [
        (name, [phase_colour(kind, inner, tree) for tree in range(len(_HUE_SHIFTS))])
        for (kind, inner), (name, _) in _PHASES.items()
    ]
    plain = [("waiting (bubble)", _BUBBLE), *([] if note else [PAYLOAD, GRADIENTS])]
    entries += [(name, [colour]) for name, colour in plain]
    x, line, parts = 24.0, y, []
    for name, colours in [*entries, *([(note, [])] if note else [])]:
        if x + 33 + 12 * svg.CHARACTER * len(name) > width:
            x, line = 24.0, line + 18
        for colour in colours:
            parts.append(svg.rect(svg.Box(x, line, 27 / len(colours), 12), colour))
            x += 27 / len(colours)
        x += 6 if colours else 0
        parts.append(svg.text(x, line + 10.5, name, 12, *([] if colours else [_FAINT])))
        x += 12 * svg.CHARACTER * len(name) + 16
    return parts, line - y


def _rows(
    timeline: Timeline,
    plans: Sequence[Plan],
    height: int,
    top: float,
    latest: float,
    tips: bool = True,
    width: float = _WIDTH,
) -> Iterator[str]:
    """One row a rank from `top` down; the whole width is the time from 0 to `latest`, and what
    begins later is left out.

    Args:
        timeline: of all rows.
        plans: of each row; a pipeline's rows have one.
        height, top, latest: of a row; of the first one; the end of the width.
        tips: whether boxes have tooltips.
        width: of the picture.
    """
    scale = (width - _LEFT - _RIGHT) / latest if latest else 0.0
    yield svg.text(width - _RIGHT + 56, top - 8, "bubble", 11, _FAINT, anchor="end")
    yield svg.text(width - 20, top - 8, "peak", 11, _FAINT, anchor="end")
    name = "stage" if plans[0].num_stages == len(plans) else "rank"
    for rank in range(len(plans)):
        y = top + rank * (height + _GAP)
        middle = y + height / 2 + 4
        yield svg.text(_LEFT - 10, middle, f"{name} {rank}", 12, anchor="end")
        shown = min(timeline.makespan, latest)
        yield svg.rect(svg.Box(_LEFT, y, shown * scale, height), _BUBBLE)
        bubble = f"{100 * timeline.bubble_fractions[rank]:.1f}%"
        yield svg.text(width - _RIGHT + 56, middle, bubble, 12, anchor="end")
        peak = _short(timeline.peak_positions[rank])
        yield svg.text(width - 20, middle, peak, 12, anchor="end")
    tree_of = {key: trees(plan.segments) for key, plan in {id(one): one for one in plans}.items()}
    lane = height / 3 if any(event.action.peer >= 0 for event in timeline.events) else 0
    for event in timeline.events:
        if event.start >= latest > 0:
            continue
        x, end = _LEFT + event.start * scale, _LEFT + min(event.end, latest) * scale
        box = svg.Box(x, top + event.rank * (height + _GAP), end - x, height - lane)
        plan = plans[event.rank]
        segment = plan.segments[event.action.segment]
        numbers = sorted({*tree_of[id(plan)][event.action.segment]})
        tip = _tip(event, segment, numbers, timeline.unit) if tips else ""
        if event.action.peer >= 0:
            low = box._replace(y=box.y + box.height, height=lane)
            yield from svg.labelled(low, _message(event.action, segment)[1], str(event.action), tip)
        else:
            yield from _action(event.action, segment.inner, numbers, box, tip)


def _summary(timeline: Timeline, plan: Plan, row: svg.Box, end: float) -> Iterator[str]:
    """The first rank's whole row in columns, each with the shares of its time; a line below is the
    part of the step, from 0 to `end`, that the rows show."""
    width = row.width - _LEFT - _RIGHT
    column, pixels = timeline.makespan / _COLUMNS, width / _COLUMNS
    shares = [dict.fromkeys(_PHASES, 0.0) for _ in range(_COLUMNS)]
    for rank, action, start, stop in timeline.events:
        if rank:
            continue
        phase = action.kind, plan.segments[action.segment].inner
        for number in range(int(start / column), min(math.ceil(stop / column), _COLUMNS)):
            inside = min(stop, (number + 1) * column) - max(start, number * column)
            shares[number][phase] += max(0.0, inside) / column
    name = "stage" if plan.num_chunks == 1 else "rank"
    heading = f"{name} 0, the whole step: each column has the shares of its time"
    yield svg.text(_LEFT, row.y - 8, heading, 11, _FAINT)
    yield svg.rect(svg.Box(_LEFT, row.y, width, row.height), _BUBBLE)
    for number, of_column in enumerate(shares):
        y = row.y + row.height
        for (kind, inner), share in of_column.items():
            y -= share * row.height
            box = svg.Box(_LEFT + number * pixels, y, pixels, share * row.height)
            if share:
                yield svg.rect(box, phase_colour(kind, inner, 0))
    window = svg.Box(_LEFT, row.y + row.height + 2, width * end / timeline.makespan, 3)
    yield svg.rect(window, _FAINT)
    yield from _axis(0, timeline.makespan, row.y + row.height + 6, "", row.width)


def _message(action: Action, segment: Segment) -> tuple[str, str]:
    """What a message is, and its colour."""
    return PAYLOAD if (action.kind == "R") == (segment.source >= 0) else GRADIENTS


def _action(
    action: Action, inner: bool, numbers: Sequence[int], box: svg.Box, tip: str
) -> Iterator[str]:
    """One box; of several trees it has the first one's hue."""
    yield from svg.labelled(box, phase_colour(action.kind, inner, numbers[0]), str(action), tip)
    if action.chunk:
        yield svg.rect(svg.shrunk(box)._replace(height=3.0), "#ffffff", opacity=0.75)


def _tip(event: Event, segment: Segment, numbers: Sequence[int], unit: str) -> str:
    what = f"{'inner' if segment.inner else 'wave'}, {_counted(len(segment.spans), 'span')}"
    if event.action.peer >= 0:
        what = f"{_message(event.action, segment)[0]}, {what}"
    where = f"tree {numbers[0]}"
    if len(numbers) > 1:
        where = f"{len(numbers)} trees, {numbers[0]} to {numbers[-1]}"
    num_rollouts = sum(len(span.rollouts) for span in segment.spans)
    return (
        f"{event.action}: {what}, {where}\n{_extent(segment)}, "
        f"{_counted(num_rollouts, 'rollout')}\n"
        f"{_number(event.start)} to {_number(event.end)} {unit}"
    )


def _extent(segment: Segment) -> str:
    longest = max(span.length for span in segment.spans)
    upto = "up to " if len(segment.spans) > 1 else ""
    return f"from position {min(span.start for span in segment.spans)}, {upto}{longest} tokens"


def _axis(
    start: float, end: float, y: float, unit: str, picture_width: float = _WIDTH
) -> Iterator[str]:
    width = picture_width - _LEFT - _RIGHT
    step = _nice((end - start) / 8)
    for number in range(int((end - start) / step) + 1 if step else 1):
        value = start + number * step
        x = _LEFT + (width * (value - start) / (end - start) if end > start else 0)
        yield f'<path d="M{svg.px(x)} {svg.px(y)}v5" stroke="{_LINE}"/>'
        yield svg.text(x, y + 18, _short(value), 11, _FAINT, anchor="middle")
    if unit:
        yield svg.text(_LEFT + width, y + 34, unit, 11, _FAINT, anchor="end")


# Trees --------------------------------------------------------------------------------------------


def _trees(segments: Sequence[Segment], top: float, whole: float) -> tuple[list[str], float]:
    """The trees drawn below `top`, and their height; fillers (plan/joint_forest.py) are in none."""
    lanes = _lanes(segments)
    spans = [
        (index, tree, span)
        for index, (segment, numbers) in enumerate(zip(segments, trees(segments), strict=True))
        for span, tree in zip(segment.spans, numbers, strict=True)
        if span.rollouts
    ]
    shown, num_trees = _shown(spans, lanes)
    spans = [entry for entry in spans if entry[1] in shown]
    if not spans:
        return [], 0
    num_lanes = 1 + max(lanes[rollout] for *_, span in spans for rollout in span.rollouts)
    lane = min(float(_LANE), _TREES_HEIGHT / num_lanes)
    width, length = whole - _LEFT - _RIGHT, max(span.end for *_, span in spans)
    which = f"first {_counted(len(shown), 'tree')} of {num_trees}"
    if len(shown) == num_trees:
        which = "tree" if num_trees == 1 else "trees"
    heading = f"{which}: one lane per rollout, a tall box is shared; numbers are segments"
    parts = [svg.text(_LEFT, top - 10, heading, 12, _FAINT)]
    for index, tree, span in spans:
        first = min(lanes[rollout] for rollout in span.rollouts)
        box = svg.Box(
            _LEFT + width * span.start / length,
            top + lane * first,
            width * span.length / length,
            lane * len(span.rollouts),
        )
        tip = (
            f"segment {index}, tree {tree}\n"
            f"from position {span.start}, {span.length} tokens\n"
            f"{_counted(len(span.rollouts), 'rollout')}: {_listed(span.rollouts)}"
        )
        colour = phase_colour("F", segments[index].inner, tree)
        parts.extend(svg.labelled(box, colour, str(index), tip))
    parts.extend(_axis(0, length, top + lane * num_lanes + 3, "position in the rollout", whole))
    return parts, lane * num_lanes


def _lanes(segments: Sequence[Segment]) -> dict[int, int]:
    """Lane of each rollout; rollouts of one span are neighbours, and so are trees."""
    paths: dict[int, list[tuple[int, int]]] = {}
    for index, segment in enumerate(segments):
        for number, span in enumerate(segment.spans):
            for rollout in span.rollouts:
                paths.setdefault(rollout, []).append((index, number))
    order = sorted(paths, key=lambda rollout: (paths[rollout], rollout))
    return {rollout: lane for lane, rollout in enumerate(order)}


def _shown(spans: Sequence[tuple[int, int, Span]], lanes: dict[int, int]) -> tuple[set[int], int]:
    """The first trees that fit, at least one, and the number of all trees."""
    ends: dict[int, int] = {}
    for _, tree, span in spans:
        ends[tree] = max(*(lanes[rollout] for rollout in span.rollouts), ends.get(tree, 0))
    return {tree for n, tree in enumerate(ends) if not n or ends[tree] < _MOST_LANES}, len(ends)


# Colours and numbers ------------------------------------------------------------------------------


def phase_colour(kind: str, inner: bool, tree: int) -> str:
    """The colour of a forward ("F") or backward ("B") of a segment of the tree with this number."""
    hue, lightness, saturation = _PHASES[kind, inner][1]
    shifted = (hue + _HUE_SHIFTS[tree % len(_HUE_SHIFTS)]) % 360 / 360
    channels = colorsys.hls_to_rgb(shifted, lightness, saturation)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def _short(value: float) -> str:
    """Three digits with k, M or G: 24.6k."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{float(f'{value / limit:.3g}'):g}{suffix}"
    return f"{float(f'{value:.3g}'):g}"


def _counted(num: int, word: str) -> str:
    return f"{num:,} {word}{'' if num == 1 else 's'}"


def _listed(rollouts: Sequence[int]) -> str:
    more = " ..." if len(rollouts) > 12 else ""
    return ", ".join(map(str, rollouts[:12])) + more


def _nice(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ... from `step` up."""
    if step <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))
