"""`bench`: both schedules are timed in the same way, on the same microbatches; `bench memory`."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import StepOutOfMemory
from megatron_prefix.lab.bench import longest, memory, steps
from megatron_prefix.lab.bench.memory import Way
from megatron_prefix.lab.bench.timing import cost_model, flop_bound
from megatron_prefix.lab.bench.work import GroupShape, Setting, Work
from megatron_prefix.lab.cli import bench_memory
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl import passes
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.rl.like_for_like import like_for_like
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.view import style
from tests.harness.command_line import BUNDLED, printed
from tests.harness.one_rank import small_model

SPEC = resolve("tiny-llama", num_layers=1).with_vocab(64)
CONFIG = PrefixConfig(min_gain=0)
WARM_UP = 2
BASELINES = (Baseline("rollout"), Baseline("packed", 64))


@pytest.fixture(scope="module")
def chunks(on_one_rank):
    return [small_model(vocab=64, spec=dict(num_layers=1), dtype=torch.float32)]


@pytest.fixture
def calls(monkeypatch):
    """Schedule and tokens of every forward-backward call."""
    made, run = [], passes.run

    def noted(schedule, step, chunks, items):
        made.append((type(schedule).__name__, [item["tokens"].tolist() for item in items]))
        return run(schedule, step, chunks, items)

    monkeypatch.setattr(passes, "run", noted)
    return made


def some_groups(num):
    return list(generate(num, 24, 8, 3, vocab_size=64, uneven=True))


def timed(chunks, work, baseline):
    return steps.time_work(
        work, Setting(SPEC, Layout(), baseline, seed=1, warm_up_calls=WARM_UP), chunks, {}
    )


@pytest.mark.parametrize("baseline", BASELINES, ids=str)
def test_both_schedules_are_warmed_alike(chunks, calls, baseline):
    shape = GroupShape(24, 8, 3)
    groups = shape.groups(1, 64, 1)
    timing = timed(chunks, Work("shape", CONFIG, [groups], [groups], repeats=2), baseline)
    assert timing.executed_tokens < timing.raw_tokens == 3 * 31
    # One more call of the prefix schedule is timed action by action.
    wanted = [WARM_UP + 2, WARM_UP + 2 + 1]
    assert [*Counter(name for name, _ in calls).values()] == wanted
    assert {*timing.phase_ms} == {*"ABC", "wait"} and min(timing.phase_ms.values()) >= 0
    assert timing.tflops > 0 and timing.bubble < 0.5 and timing.simulated_bubble == 0
    assert {len(tokens) for _, tokens in calls} == {timing.microbatches}
    assert timing.microbatches == {"rollout": 3, "packed": 2}[baseline.name]


def test_steps_are_of_new_groups_and_each_is_run_once_by_both(chunks, calls):
    groups = some_groups(8)
    work = Work("file", CONFIG, [groups[:2]], [groups[2:4], groups[4:6], groups[6:]])
    timing = timed(chunks, work, BASELINES[1])
    half = WARM_UP + 3
    stock, prefix = ([tokens for _, tokens in part] for part in (calls[:half], calls[half:]))
    assert stock == prefix[:-1] and prefix[-1] == prefix[-2]
    assert len({str(tokens) for tokens in stock}) == 1 + 3
    assert timing.steps == timing.shared_steps == len(timing.prefix_step_ms) == 3
    assert timing.rollouts == 18 and timing.microbatches == sum(map(len, stock[WARM_UP:]))
    assert timing.raw_tokens == sum(len(r) - 1 for g in groups[2:] for r in g.rollouts)
    assert timing.speedup == sum(timing.stock_step_ms) / sum(timing.prefix_step_ms)
    assert timing.median_speedup == timing.stock_ms / timing.prefix_ms


def test_steps_that_fall_back_execute_every_token(chunks):
    groups = some_groups(4)
    config = replace(CONFIG, mode="auto", min_speedup=100.0)
    timing = timed(chunks, Work("file", config, [groups[:2]], [groups[2:]]), BASELINES[1])
    assert (timing.shared_steps, timing.segments) == (0, 0)
    assert timing.executed_tokens == timing.raw_tokens
    assert timing.plan_bound == 1 < timing.bound


def test_the_bound_counts_pairs_and_all_that_can_be_shared():
    """A prompt of 24 tokens, three responses of 8: 23 positions are shared, the last prompt token
    predicts tokens of its own, and only those 8 of each rollout need the output layer."""
    [group] = GroupShape(24, 8, 3).groups(1, 64, 1)
    linear, head, attention, *_ = cost_model(SPEC).forward
    stock = 3 * (31 * (linear + head) + attention * 31 * 32 / 2)
    shared = 23 * linear + attention * 23 * 24 / 2
    own = 3 * (8 * (linear + head) + attention * (8 * 23 + 8 * 9 / 2))
    bound = flop_bound(SPEC, PrefixConfig(min_gain=10**6), [[group]] * 2)
    assert bound == pytest.approx(stock / (shared + own), rel=1e-12)


WINDOWS = (("window_size", (16, 0)),)
MATH = "math (Megatron's, unfused)"


@pytest.mark.parametrize(("dtype", "overrides", "kernel", "stock", "prefix"), [
    ("float32", (), "auto", "flash_cpu", "flash_cpu"),
    ("float64", (), "auto", MATH, "math"),
    ("float32", WINDOWS, "auto", MATH, "math"),
    ("float32", (), "math", MATH, "math"),  # what a user names stays
])  # fmt: skip
def test_both_schedules_are_timed_with_one_kernel(chunks, dtype, overrides, kernel, stock, prefix):
    spec = resolve("tiny-llama", num_layers=1, vocab_size=256, **dict(overrides))
    options = ModelOptions("tiny-llama", dtype)
    options, config = like_for_like(options, spec, PrefixConfig(kernel=kernel))
    shape = GroupShape(24, 8, 2).groups(1, 256, 1)
    setting = Setting(spec, Layout(), Baseline(), 1, dtype, False, 1)
    work = Work("a", config, [shape], [shape])
    row = steps.time_work(work, setting, options.build(spec, Layout()), {})
    assert (row.stock_attention, row.prefix_attention) == (stock, prefix)


def test_consecutive_steps_of_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    options = "--groups 1 --steps 2 --max-tokens 96 --min-gain 0 --pack-tokens 200".split()
    options += ["--prefix-schedule", "auto", "--set", "num_layers=1", "--plot", str(plot)]
    result = printed("bench", "--rollouts", BUNDLED, *options)
    [row] = result["rows"]
    assert result["alignment"]["passed"] and result["alignment"]["baseline"] == "packed"
    assert (row["baseline"], row["pack_tokens"], row["steps"]) == ("packed", 200, 2)
    assert len(row["stock_step_ms"]) == len(row["prefix_step_ms"]) == 2
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert row["executed_tokens"] < row["raw_tokens"] and row["segments"] > 0
    assert row["bound"] >= row["plan_bound"] > 1 and row["microbatches"] < row["rollouts"]


@pytest.mark.parametrize("options", [
    "--model tiny-moe --align-layers 1 --cp 2 --overlap-grad-reduce --forward-only",
    "--pp 2 --chunk-tokens 48",
])  # fmt: skip
def test_schedules_are_timed_in_a_layout(options):
    usual = "--shapes 96:24:3 --shape-groups 2 --pack-tokens 300 --min-gain 0 --repeats 1"
    found = printed("bench", *f"{usual} {options} --set num_layers=2".split())
    assert found["alignment"]["passed"]
    [row] = found["rows"]
    dp = found["layout"]["dp"]
    positions = 2 * dp * 3 * 119
    assert positions <= row["raw_tokens"] < 1.1 * positions
    assert row["rollouts"] == 2 * dp * 3
    assert row["executed_tokens"] < 0.6 * row["raw_tokens"]
    assert row["bound"] > 1 and row["speedup"] > 0 and row["tflops"] > 0
    assert found["forward_only"] == ("--forward-only" in options)
    assert found["overlap_grad_reduce"] == ("--overlap-grad-reduce" in options)
    assert (row["phase_ms"]["C"] == 0) == found["forward_only"]
    assert (row["simulated_bubble"] > 0) == (found["layout"]["pp"] > 1)
    assert 0 <= row["bubble"] < 1


ON_MATH = PrefixConfig(kernel="math")


@pytest.fixture(scope="module")
def stack(on_one_rank):
    return [small_model(vocab=128, spec=dict(num_layers=4), dtype=torch.float32)]


def measured(stack, way):
    shape = GroupShape(160, 32, 3)
    return memory.measure(shape, Way.parse(way), stack, ON_MATH, repeats=0, seed=1)


def test_policies_hold_less_one_after_the_other(stack):
    ways = ("stock", "stock+full", "retain", "recompute", "offload")
    found = {way: measured(stack, way) for way in ways}
    counted = {way: row.peak_gib for way, row in found.items()}
    assert counted["offload"] < counted["recompute"] < counted["retain"]
    assert counted["stock+full"] < counted["stock"]
    assert found["offload"].offloaded_gib > 0 == found["retain"].offloaded_gib
    for row in found.values():
        assert not row.problem and row.ms > 0 and row.predicted_gib >= 0.9 * row.peak_gib
    assert unwrap(stack[0]).config.recompute_granularity is None


def test_a_step_that_does_not_fit_is_a_row_too(stack, monkeypatch):
    def failing(*_, **__):
        raise StepOutOfMemory("out of device memory: so and so\na table")

    monkeypatch.setattr(memory, "_call", failing)
    row = measured(stack, "retain")
    assert row.problem == "out of device memory: so and so" and row.peak_gib is None


def test_the_frontier_is_where_the_model_says_that_it_ends(stack):
    options = dict(capacity=3e7, step=16, num_tries=0, seed=1)
    found = {
        way: longest.frontier(32, Way.parse(way), stack, ON_MATH, **options).predicted
        for way in ("stock", "stock+full", "retain")
    }
    assert found["stock"] < found["retain"] and found["stock"] < found["stock+full"]
    for length, fits in ((found["stock"], True), (found["stock"] + 16, False)):
        peak = memory.predicted(GroupShape(length - 32, 32, 2), Way("stock"), stack, ON_MATH).peak
        assert (peak <= 3e7) == fits


def test_the_verb_bench_memory(tmp_path):
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
