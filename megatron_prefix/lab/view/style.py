"""The one style of plots: colours of the schedules, no frame, legends outside of curves."""

from __future__ import annotations

from typing import Any

STOCK, PREFIX, FLOOR = "#9aa5b1", "#3b6ea5", "#d0672c"
"""Colours of the stock schedule, of the prefix schedule, and of the noise between stock runs."""
MORE = ("#7fb2e0", FLOOR, "#e6c84f", "#2f8f5b", "#8a5fbf")
"""Colours of further bars, such as memory policies."""


def without_frame(axes: Any) -> None:
    """Leaves the left and the lower axis of matplotlib's frame."""
    axes.spines[["top", "right"]].set_visible(False)


def legend_beside(axes: Any, **more: Any) -> None:
    """The legend to the right of the panel, with more arguments of matplotlib."""
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axes.legend(frameon=False, fontsize="small", **place, **more)
