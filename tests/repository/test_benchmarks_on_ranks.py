"""Benchmarks that start ranks, small: their form, not their times."""

import faulthandler
import json
import re
import sys

from benchmarks import overlap_experts, pipeline_plans
from tests.harness import ranks  # noqa: F401  # ranks are forked from here
from tests.harness.command_line import BUNDLED


def test_plans_of_a_pipeline_are_timed_and_orders_compared(capsys):
    sizes = dict(groups=2, rollouts=2, prompt=32, response=8, hidden=32, layers=2, repeats=2)
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    code = pipeline_plans.main([*options, "--chunk-tokens", "16", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["setting"] == {**sizes, "chunk_tokens": 16, "device": "cpu", "model": ""}
    assert found["stock_ms"] > 0
    assert [row["plan"] for row in found["plans"]] == list(pipeline_plans.NAMES)
    for row in found["plans"]:
        assert 0 < row["fastest_ms"] <= row["measured_ms"] <= row["slowest_ms"]
        assert row["simulated_ms"] > 0
        assert 0 < row["simulated_bubble"] < 1 and 0 < row["measured_bubble"] < 1
    simulated, measured = (
        [row["plan"] for row in sorted(found["plans"], key=lambda row: row[column])]
        for column in ("simulated_ms", "measured_ms")
    )
    assert found["orders_agree"] == (simulated == measured) == (code == 0)


def test_overlap_of_experts_has_a_line_for_every_seed(capfd, monkeypatch, tmp_path):
    options = "--model tiny-moe --dtype float32 --max-tokens 128 --steps 1 --seeds 2"
    options = [*options.split(), "--step-tokens", "1000", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["program", BUNDLED, *options])
    faulthandler.cancel_dump_traceback_later()  # a fork would wait for its thread
    overlap_experts.main()
    lines = capfd.readouterr().out.splitlines()
    for seed in range(2):
        pattern = rf"seed {seed}: [\d,]+ tokens, stock \d+ ms, prefix \d+ ms, reductions during"
        assert re.match(pattern, lines[seed]), lines
    assert lines[1].endswith("in 1 of 1 steps of ours")
    assert lines[-1] == "2 of 2 ended"
