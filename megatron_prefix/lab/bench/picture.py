"""Draws rows of `bench`: speedups, a step's time by phase, peaks of memory, steps' times. [pure]

A row is what the JSON has of it (`timing.Timing` says what its fields are), so that a result from
another machine can be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from megatron_prefix.lab.view.style import PREFIX, STOCK, legend_beside, without_frame

Row = Mapping[str, Any]

PHASES = {
    "A": ("A: forward, inner segments", "#1f5a96"),
    "B": ("B: waves", "#7fb2e0"),
    "C": ("C: backward, inner segments", "#d0672c"),
    "wait": ("waiting for other ranks", "#e6c84f"),
}
"""Name and colour of what a step of the prefix schedule does, from the bottom of its bar."""
_BOUND, _FAINT = "#d8dee9", "#5b6570"
_WIDTH = 0.38  # of one of two bars next to each other


def figure(rows: Sequence[Row]) -> Figure:
    """Draws the rows side by side.

    Args:
        rows: at least one, fields of `timing.Timing`.

    Returns:
        A figure with one panel above the other: speedup and bound; the time of the last step by
        phase, next to the stock schedule's; peaks of device memory, if it was measured; every
        step's time, if a row has several.
    """
    panels: list[tuple[Callable[[Axes, Sequence[Row]], None], float]] = [(_speedups, 2.4)]
    panels.append((_phases, 3.0))
    if any(row["stock_gib"] or row["prefix_gib"] for row in rows):
        panels.append((_peaks, 2.2))
    several = [row for row in rows if len(row["stock_step_ms"]) > 1]
    shared = len(panels)  # these have the rows as their horizontal axis
    heights = [height for _, height in panels] + ([2.4] if several else [])
    names = _names(rows)
    drawn = Figure(figsize=(max(7.5, 3.0 + 1.5 * len(rows)), sum(heights)), layout="constrained")
    axes = drawn.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    for place, (draw, _) in enumerate(panels):
        draw(axes[place], rows)
        _name_rows(axes[place], names if place == shared - 1 else [""] * len(rows))
    if several:
        _steps(axes[-1], several)
    return drawn


def _names(rows: Sequence[Row]) -> list[str]:
    """What rows are called under the bars: with the segments' length if rows differ in it, and
    with the bubble if there are several stages."""
    differ = len({row["segment_tokens"] for row in rows}) > 1
    names = []
    for row in rows:
        lines = [_name(row)]
        if differ:
            lines.append(f"segments {row['segment_tokens']}")
        if row["simulated_bubble"]:
            lines.append(f"bubble {row['bubble']:.3f}")
            lines.append(f"simulated {row['simulated_bubble']:.3f}")
        names.append("\n".join(lines))
    return names


def _name(row: Row) -> str:
    return str(row["name"]).partition(".")[0]


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    long = max(len(line) for name in names for line in name.split("\n")) > 16
    tilted = long and len(names) > 3
    axes.set_xticks(
        range(len(names)), names, rotation=20 if tilted else 0, ha="right" if tilted else "center"
    )
    axes.set_xlim(-0.6, len(names) - 0.4)
    without_frame(axes)


def _label(axes: Axes, place: float, height: float, text: str) -> None:
    axes.annotate(
        text, (place, height), (0, 2), textcoords="offset points", ha="center", va="bottom",
        fontsize="small", color=_FAINT,
    )  # fmt: skip


def _speedups(axes: Axes, rows: Sequence[Row]) -> None:
    """Measured speedup inside of what the FLOP count allows."""
    places = range(len(rows))
    axes.bar(places, [row["bound"] for row in rows], 0.76, color=_BOUND, label="FLOP bound")
    axes.bar(places, [row["speedup"] for row in rows], 0.5, color=PREFIX, label="measured")
    axes.axhline(1, color="black", linewidth=0.8)
    for place, row in enumerate(rows):
        top = max(row["bound"], row["speedup"])
        _label(axes, place, top, f"{row['speedup']:.2f}x\n{row['of_bound']:.3f} of bound")
    axes.set_ylabel("speedup over stock")
    axes.margins(y=0.28)
    legend_beside(axes)


def _phases(axes: Axes, rows: Sequence[Row]) -> None:
    """The last step: stock's time, and the prefix schedule's by phase, of a call of its own."""
    places = range(len(rows))
    stock = [row["stock_step_ms"][-1] for row in rows]
    axes.bar([place - 0.2 for place in places], stock, _WIDTH, color=STOCK, label="stock schedule")
    tops = [0.0] * len(rows)
    beside = [place + 0.2 for place in places]
    for phase, (name, color) in PHASES.items():
        times = [row["phase_ms"].get(phase, 0.0) for row in rows]
        if any(times):
            axes.bar(beside, times, _WIDTH, tops, color=color, label=name)
        tops = [top + spent for top, spent in zip(tops, times, strict=True)]
    alone = [place for place, row in enumerate(rows) if not row["phase_ms"]]
    if alone:
        heights = [rows[place]["prefix_step_ms"][-1] for place in alone]
        axes.bar(
            [place + 0.2 for place in alone], heights, _WIDTH, color="white", edgecolor=STOCK,
            hatch="//", label="prefix schedule, which ran stock",
        )  # fmt: skip
    whole = [row["prefix_step_ms"][-1] for row in rows]
    axes.plot(beside, whole, "_", color="black", markersize=16, label="prefix schedule, whole call")
    for place in places:
        _label(axes, place - 0.2, stock[place], f"{stock[place]:,.0f}")
        top = max(tops[place], whole[place])
        _label(axes, place + 0.2, top, f"{whole[place]:,.0f}")
    axes.set_ylabel("last step, ms")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.15)
    legend_beside(axes)


def _peaks(axes: Axes, rows: Sequence[Row]) -> None:
    """Peak of allocated device memory of both schedules, and what was predicted."""
    places = range(len(rows))
    for shift, field, name, color in (
        (-0.2, "stock_gib", "stock schedule", STOCK),
        (0.2, "prefix_gib", "prefix schedule", PREFIX),
    ):
        heights = [row[field] for row in rows]
        axes.bar([place + shift for place in places], heights, _WIDTH, color=color, label=name)
    predicted = [row["predicted_gib"] or float("nan") for row in rows]
    beside = [place + 0.2 for place in places]
    axes.plot(beside, predicted, "_", color="black", markersize=16, label="predicted")
    for place, row in enumerate(rows):
        _label(axes, place - 0.2, row["stock_gib"], f"{row['stock_gib']:.0f}")
        top = max(row["prefix_gib"], row["predicted_gib"] or 0.0)
        _label(axes, place + 0.2, top, f"{row['prefix_gib']:.0f}")
    axes.set_ylabel("peak memory, GiB")
    axes.margins(y=0.15)
    legend_beside(axes)


def _steps(axes: Axes, rows: Sequence[Row]) -> None:
    """Times of consecutive steps: a colour a row, broken lines for the stock schedule."""
    handles = []
    for number, row in enumerate(rows):
        color = f"C{number % 10}"
        for times, style in ((row["stock_step_ms"], "--"), (row["prefix_step_ms"], "-")):
            steps = range(1, len(times) + 1)
            axes.plot(steps, times, style, color=color, marker="o", markersize=3, linewidth=1.2)
        handles.append(Line2D([], [], color=color, label=_name(row)))
    handles.append(Line2D([], [], color=_FAINT, linestyle="--", label="stock schedule"))
    handles.append(Line2D([], [], color=_FAINT, linestyle="-", label="prefix schedule"))
    axes.set_xlabel("step")
    axes.set_ylabel("every step, ms")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    without_frame(axes)
    legend_beside(axes, handles=handles)
