"""`bench memory` on the CPU: its parts, and one run of the verb."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import StepOutOfMemory
from megatron_prefix.lab.bench import longest, memory
from megatron_prefix.lab.bench.memory import Way
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.cli import bench_memory
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.view import style
from tests.harness.command_line import printed
from tests.harness.one_rank import one_rank, small_model

CONFIG = PrefixConfig(kernel="math")


@pytest.fixture(scope="module")
def chunks():
    with one_rank():
        yield [small_model(vocab=128, spec=dict(num_layers=4), dtype=torch.float32)]


def measured(chunks, way):
    shape = GroupShape(160, 32, 3)
    return memory.measure(shape, Way.parse(way), chunks, CONFIG, repeats=0, seed=1)


def test_policies_hold_less_one_after_the_other(chunks):
    ways = ("stock", "stock+full", "retain", "recompute", "offload")
    found = {way: measured(chunks, way) for way in ways}
    counted = {way: row.peak_gib for way, row in found.items()}
    assert counted["offload"] < counted["recompute"] < counted["retain"]
    assert counted["stock+full"] < counted["stock"]
    assert found["offload"].offloaded_gib > 0 == found["retain"].offloaded_gib
    for row in found.values():
        assert not row.problem and row.ms > 0 and row.predicted_gib >= 0.9 * row.peak_gib
    assert unwrap(chunks[0]).config.recompute_granularity is None


def test_a_step_that_does_not_fit_is_a_row_too(chunks, monkeypatch):
    def failing(*_, **__):
        raise StepOutOfMemory("out of device memory: so and so\na table")

    monkeypatch.setattr(memory, "_call", failing)
    row = measured(chunks, "retain")
    assert row.problem == "out of device memory: so and so" and row.peak_gib is None


def test_the_frontier_is_where_the_model_says_that_it_ends(chunks):
    options = dict(capacity=3e7, step=16, num_tries=0, seed=1)
    found = {
        way: longest.frontier(32, Way.parse(way), chunks, CONFIG, **options).predicted
        for way in ("stock", "stock+full", "retain")
    }
    assert found["stock"] < found["retain"] and found["stock"] < found["stock+full"]
    for length, fits in ((found["stock"], True), (found["stock"] + 16, False)):
        peak = memory.predicted(GroupShape(length - 32, 32, 2), Way("stock"), chunks, CONFIG).peak
        assert (peak <= 3e7) == fits


def test_the_verb(tmp_path):
    """In a process of its own: process groups over gloo leave threads behind."""
    plot, out = tmp_path / "memory.svg", tmp_path / "memory.json"
    command = "bench memory --shapes 96:16:2 --ways stock recompute offload --frontier 16"
    command += " --capacity-gb 0.1 --repeats 0 --align-layers 1"
    result = printed(*command.split(), "--plot", str(plot), "--bench-json", str(out))
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert result["aligned"] and result["peaks"] == "counted"
    assert [row["way"] for row in result["rows"]] == ["stock", "recompute", "offload"]
    assert all(row["peak_gib"] > 0 and not row["problem"] for row in result["rows"])
    assert [one["way"] for one in result["frontier"]] == ["stock", "recompute", "offload"]
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_the_legend_of_memory_is_beside_its_bars():
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgba

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
    assert [first, second] == [to_rgba(style.STOCK), to_rgba(style.PREFIX)]
