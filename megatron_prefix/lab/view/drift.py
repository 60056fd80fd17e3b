"""Draws a replay: how far the parameters drift apart, losses and weighted log-probs. [pure]

Takes what the JSON of `replay` has, so that a result from another machine can be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

STOCK, PREFIX, FLOOR = "#9aa5b1", "#3b6ea5", "#d0672c"
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
    drawn = Figure(figsize=(11.0, 6.0), layout="constrained")
    grid = drawn.add_gridspec(2, 6)
    for place, measure in enumerate(MEASURES):
        axes = drawn.add_subplot(grid[0, 2 * place : 2 * place + 2])
        _distances(axes, steps, measure, result["limit"])
    _curves(drawn.add_subplot(grid[1, :3]), steps, "loss", "loss")
    title = "advantage times log-prob"
    _curves(drawn.add_subplot(grid[1, 3:]), steps, "weighted_logprob", title)
    return drawn


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
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
