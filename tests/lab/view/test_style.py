"""Plots share one style: no frame, and legends outside of the curves."""

from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

from megatron_prefix.lab.cli import bench_memory
from megatron_prefix.lab.view import style


def test_the_legend_of_memory_is_beside_its_bars():
    rows = [
        SimpleNamespace(name="512:64:4", way=way, peak_gib=2.0, predicted_gib=2.1)
        for way in ("stock", "retain", "recompute")
    ]
    drawn = bench_memory.figure(rows)
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    assert axes.get_legend().get_window_extent().x0 > axes.get_window_extent().x1
    assert not any(axes.spines[side].get_visible() for side in ("top", "right"))
    (first, second, third) = (bar.patches[0].get_facecolor() for bar in axes.containers)
    assert len({first, second, third}) == 3
    from matplotlib.colors import to_rgba

    assert [first, second] == [to_rgba(style.STOCK), to_rgba(style.PREFIX)]
