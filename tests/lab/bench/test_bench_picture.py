"""The figure of `bench --plot`."""

import pytest

from megatron_prefix.lab.bench import timing

pytest.importorskip("matplotlib")
from megatron_prefix.lab.bench.picture import PHASES, PREFIX, STOCK, figure

PHASE_MS = {"A": 20.0, "B": 50.0, "C": 25.0, "wait": 0.0}


def row(**changes):
    """A row on a GPU, whose one step took 300 ms stock and 100 ms with the prefix schedule."""
    usual = {
        "name": "96:24:3", "segment_tokens": 4096, "speedup": 3.0, "bound": 4.0, "of_bound": 0.75,
        "stock_step_ms": (300.0,), "prefix_step_ms": (100.0,), "phase_ms": PHASE_MS,
        "bubble": 0.0, "simulated_bubble": 0.0,
        "stock_gib": 50.0, "prefix_gib": 60.0, "predicted_gib": 61.0,
    }  # fmt: skip
    assert usual.keys() <= timing.Timing.__dataclass_fields__.keys()
    return usual | changes


def boxes(axes, color):
    """Bottom and height of a panel's bars of one colour."""
    from matplotlib.colors import to_rgba

    wanted = to_rgba(color)
    return [(b.get_y(), b.get_height()) for b in axes.patches if b.get_facecolor() == wanted]


def texts(axes):
    return " ".join(text.get_text() for text in [*axes.texts, *axes.get_xticklabels()])


def test_a_step_is_stacked_by_phase_beside_the_stock_schedules():
    speedups, phases, peaks = figure([row(), row(name="8:4:2")]).axes
    assert boxes(speedups, PREFIX) == [(0, 3.0)] * 2
    assert boxes(phases, STOCK) == [(0, 300.0)] * 2
    colors = {phase: color for phase, (_, color) in PHASES.items()}
    assert boxes(phases, colors["A"]) == [(0, 20.0)] * 2
    assert boxes(phases, colors["B"]) == [(20.0, 50.0)] * 2
    assert boxes(phases, colors["C"]) == [(70.0, 25.0)] * 2
    assert boxes(phases, colors["wait"]) == []
    assert boxes(peaks, STOCK) == [(0, 50.0)] * 2 and boxes(peaks, PREFIX) == [(0, 60.0)] * 2
    assert list(phases.lines[0].get_ydata()) == [100.0, 100.0]
    assert list(peaks.lines[0].get_ydata()) == [61.0, 61.0]
    assert "3.00x\n0.750 of bound" in texts(speedups)
    assert "96:24:3" in texts(peaks) and "8:4:2" in texts(peaks)


def test_bars_and_names_lie_in_the_figure(tmp_path):
    rows = [row(name=f"a-file-with-a-long-name-{number}.jsonl.gz") for number in range(6)]
    drawn = figure(rows)
    drawn.savefig(tmp_path / "plot.png", dpi=50)
    box = drawn.get_tightbbox()
    width, height = drawn.get_size_inches()
    assert box.x0 >= -0.02 and box.y0 >= -0.02
    assert box.x1 <= width + 0.02 and box.y1 <= height + 0.02
