"""The figure of `bench --plot`."""

import pytest

from megatron_prefix.lab.bench import timing
from tests.harness.command_line import BUNDLED, forked

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


def test_waits_and_bubbles_of_a_pipeline():
    waits = row(phase_ms=PHASE_MS | {"wait": 5.0}, bubble=0.25, simulated_bubble=0.125)
    _, phases, peaks = figure([waits]).axes
    assert boxes(phases, PHASES["wait"][1]) == [(95.0, 5.0)]
    assert "bubble 0.250\nsimulated 0.125" in texts(peaks)


def test_every_step_of_a_file():
    several = row(
        name="agents.jsonl.gz", stock_step_ms=(1.0, 2.0, 4.0), prefix_step_ms=(1.0, 1.5, 2.0)
    )
    *_, phases, _peaks, steps = figure([several, row()]).axes
    assert boxes(phases, STOCK) == [(0, 4.0), (0, 300.0)]  # the last step, as the phases
    drawn = [(line.get_linestyle(), list(line.get_ydata())) for line in steps.lines]
    assert drawn == [("--", [1.0, 2.0, 4.0]), ("-", [1.0, 1.5, 2.0])]


def test_a_step_that_ran_stock_has_no_phases():
    _, phases, _ = figure([row(phase_ms={}), row()]).axes
    assert [box.get_height() for box in phases.patches if box.get_hatch()] == [100.0]
    assert boxes(phases, PHASES["B"][1]) == [(0.0, 0.0), (20.0, 50.0)]


def test_no_panel_for_memory_that_was_not_measured():
    assert len(figure([row(stock_gib=0.0, prefix_gib=0.0)]).axes) == 2


def test_rows_of_other_segments_are_told_apart():
    drawn = figure([row(), row(segment_tokens=2048)]).axes[-1]
    assert "segments 4096" in texts(drawn) and "segments 2048" in texts(drawn)
    assert "segments" not in texts(figure([row()]).axes[-1])


def test_bars_and_names_lie_in_the_figure(tmp_path):
    rows = [row(name=f"a-file-with-a-long-name-{number}.jsonl.gz") for number in range(6)]
    drawn = figure(rows)
    drawn.savefig(tmp_path / "plot.png", dpi=50)
    box = drawn.get_tightbbox()
    width, height = drawn.get_size_inches()
    assert box.x0 >= -0.02 and box.y0 >= -0.02
    assert box.x1 <= width + 0.02 and box.y1 <= height + 0.02


def test_the_verb_draws_it(tmp_path):
    plot = tmp_path / "bench.svg"
    options = "--groups 1 --steps 2 --max-tokens 96 --min-gain 0 --set num_layers=1".split()
    done = forked("bench", "--rollouts", BUNDLED, *options, "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")
