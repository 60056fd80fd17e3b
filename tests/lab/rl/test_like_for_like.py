"""Speeds on a CPU compare schedules, and not attention kernels."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.bench import steps
from megatron_prefix.lab.bench.timing import Timing
from megatron_prefix.lab.bench.work import GroupShape, Setting, Work
from megatron_prefix.lab.cli import bench
from megatron_prefix.lab.cli.main import Parser
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.rl.like_for_like import like_for_like
from megatron_prefix.lab.runtime import Layout
from tests.harness.one_rank import one_rank

WINDOWS = (("window_size", (16, 0)),)
MATH = "math (Megatron's, unfused)"


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank():
        yield


@pytest.mark.parametrize(
    ("dtype", "overrides", "kernel", "stock", "prefix"),
    [
        ("float32", (), "auto", "flash_cpu", "flash_cpu"),
        ("float64", (), "auto", MATH, "math"),
        ("float32", WINDOWS, "auto", MATH, "math"),
        ("float32", (), "math", MATH, "math"),  # what a user names stays
    ],
)
def test_both_schedules_are_timed_with_one_kernel(dtype, overrides, kernel, stock, prefix):
    spec = resolve("tiny-llama", num_layers=1, vocab_size=256, **dict(overrides))
    options = ModelOptions("tiny-llama", dtype)
    options, config = like_for_like(options, spec, PrefixConfig(kernel=kernel))
    shape = GroupShape(24, 8, 2).groups(1, 256, 1)
    setting = Setting(spec, Layout(), Baseline(), 1, dtype, False, 1)
    work = Work("a", config, [shape], [shape])
    row = steps.time_work(work, setting, options.build(spec, Layout()), {})
    assert (row.stock_attention, row.prefix_attention) == (stock, prefix)


@pytest.mark.parametrize(("device", "peaks"), [("cpu", False), ("cuda", True)])
def test_tables_name_kernels_and_no_peak_that_was_not_measured(capsys, device, peaks):
    """On a CPU they were 0.0."""
    values = dict.fromkeys((field.name for field in fields(Timing)), 1.0)
    values |= {"name": "512:64:4", "stock_attention": "flash_cpu", "prefix_attention": "math"}
    row = SimpleNamespace(**values | {"stock_step_ms": [1.0], "prefix_step_ms": [1.0]})
    args = Parser()
    bench.add_arguments(args)
    given = args.parse_args(["--device", device])
    bench.show(given, SimpleNamespace(passed=True), [row])
    said = capsys.readouterr().out
    assert "attention of all rows: flash_cpu (stock), math (prefix)" in said
    assert (("peak GiB" in said), ("not measured on a CPU" in said)) == (peaks, not peaks)


def test_a_gpu_keeps_what_it_has():
    options, config = ModelOptions("tiny-llama", device="cuda"), PrefixConfig()
    assert like_for_like(options, resolve("tiny-llama"), config) == (options, config)
