"""Speeds on a CPU compare schedules, and not attention kernels."""

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.bench import steps
from megatron_prefix.lab.bench.work import GroupShape, Setting, Work
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
