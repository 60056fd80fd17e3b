"""Draws a replay: how far the parameters drift apart, losses and weighted log-probs. [pure]

Takes what the JSON of `replay` has, so that a result from another machine can be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_prefix.lab.view.style import FLOOR, PREFIX, STOCK, without_frame

RUNS = {
    "stock": ("stock schedule", STOCK, "-"),
    "reordered": ("stock schedule, other order", FLOOR, ":"),
    "prefix": ("prefix schedule", PREFIX, "--"),
}
MEASURES = {"max": "largest", "mean": "mean", "rms": "RMS"}


def figure(result: Mapping[str, Any]) -> Figure:
    """Draws one replay.

    Args:
        result: fields of `verify.replay.Replay` with at least one step.

    Returns:
        A figure with a panel for each measure of the parameters' difference, by step, with the
        limit above the noise floor; and the curves of loss and weighted log-prob of all runs.
    """
    steps = result["steps"]
    drawn = Figure(figsize=(11.0, 6.6), layout="constrained")
    grid = drawn.add_gridspec(2, 6)
    for place, measure in enumerate(MEASURES):
        axes = drawn.add_subplot(grid[0, 2 * place : 2 * place + 2])
        _distances(axes, steps, measure, result["limit"])
    _legend(drawn, axes, "outside upper center")
    _curves(drawn.add_subplot(grid[1, :3]), steps, "loss", "loss")
    title, axes = "advantage times log-prob", drawn.add_subplot(grid[1, 3:])
    _curves(axes, steps, "weighted_logprob", title)
    _legend(drawn, axes, "outside lower center")
    return drawn


def _legend(drawn: Figure, axes: Axes, place: Any) -> None:
    """One for a row of panels with the same lines, beside them: inside curves would cross it."""
    handles, labels = axes.get_legend_handles_labels()
    drawn.legend(handles, labels, loc=place, ncols=3, frameon=False)


def _distances(axes: Axes, steps: Sequence[Mapping[str, Any]], measure: str, limit: float) -> None:
    numbers = [step["number"] for step in steps]
    floor = [step["floor"][measure] for step in steps]
    drift = [step["drift"][measure] for step in steps]
    axes.plot(numbers, floor, color=FLOOR, label="stock, other order (noise floor)")
    axes.plot(numbers, [limit * f for f in floor], ":", color=FLOOR, label=f"{limit:g} times that")
    axes.plot(numbers, drift, color=PREFIX, label="prefix schedule")
    if any(floor) or any(drift):
        axes.set_yscale("log")
    _finish(axes, f"{MEASURES[measure]} difference of a parameter")


def _curves(axes: Axes, steps: Sequence[Mapping[str, Any]], name: str, title: str) -> None:
    numbers = [step["number"] for step in steps]
    for run, (label, color, style) in RUNS.items():
        axes.plot(numbers, [step[name][run] for step in steps], style, color=color, label=label)
    _finish(axes, title)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("step")
    numbers: Any = axes.lines[0].get_xdata()
    axes.set_xticks(_ticks(int(numbers[0]), int(numbers[-1])))
    without_frame(axes)


def _ticks(first: int, last: int) -> list[int]:
    """The first and the last step, and round ones between them that are not next to these."""
    places = MaxNLocator(6, integer=True).tick_values(first, last)
    apart = (last - first) / 12
    between = (int(place) for place in places if first + apart < place < last - apart)
    return sorted({first, *between, last})
