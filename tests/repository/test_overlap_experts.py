"""`benchmarks.overlap_experts`, small: its lines, and a step that hangs."""

import faulthandler
import re
import sys
import time

import pytest

from benchmarks import overlap_experts
from megatron_prefix.lab.runtime.launch import RankError
from tests.harness.command_line import BUNDLED

OPTIONS = ("--model", "tiny-moe", "--dtype", "float32", "--max-tokens", "128", "--steps", "1")


def run(monkeypatch, output, *options):
    """The program, on two ranks that are started here."""
    told = ["program", BUNDLED, *OPTIONS, "--output", str(output), *options]
    monkeypatch.setattr(sys, "argv", [*map(str, told)])
    faulthandler.cancel_dump_traceback_later()  # a fork would wait for its thread
    overlap_experts.main()


def test_every_seed_has_a_line(capfd, monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "--seeds", "2", "--step-tokens", "1000")
    lines = capfd.readouterr().out.splitlines()
    for seed in range(2):
        pattern = rf"seed {seed}: [\d,]+ tokens, stock \d+ ms, prefix \d+ ms, reductions during"
        assert re.match(pattern, lines[seed]), lines
    assert lines[1].endswith("in 1 of 1 steps of ours")
    assert lines[-1] == "2 of 2 ended"


def test_a_step_that_hangs_ends_both_ranks_and_says_where(monkeypatch, tmp_path):
    monkeypatch.setattr(overlap_experts, "milliseconds", lambda *_: time.sleep(60))
    with pytest.raises(RankError):
        run(monkeypatch, tmp_path, "--seed-s", "0.3", "--stock-only")
    for rank in range(2):
        said = (tmp_path / f"stacks-{rank}.txt").read_text(encoding="utf-8")
        assert said.startswith("seed 0, step 0, stock\n")
        assert "Timeout" in said and "in run_rank" in said
