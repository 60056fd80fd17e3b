"""Benchmarks, small: they run, compare what they time, and print their rows."""

import copy
import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import (
    across_ranks_planning,
    across_ranks_simulation,
    documents,
    peers,
    peers_step,
    pipeline_bubbles,
    step_trace,
    vision_step,
)
from benchmarks.barriers import barrier_plan, simulate_with_barriers
from benchmarks.pipeline_picture import picture
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.cli.main import make_parser
from megatron_prefix.lab.cli.modelling import model_options
from megatron_prefix.lab.models import presets
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify.matrix import rows
from megatron_prefix.plan.planner import loss_ready_after
from megatron_prefix.tree import TreeOptions, build
from tests.harness.command_line import BUNDLED
from tests.harness.command_line import script as run_script
from tests.harness.data import REPOSITORY
from tests.harness.one_rank import one_rank
from tests.harness.trees import flat_rollouts

VISION = "--device cpu --dtype float64 --model tiny-qwen3 --tower tiny --prompt 160 --answer 16"
VISION += " --image-tokens 12 --rollouts 4 --pack-tokens 400 --warm-up-calls 1 --repeats 1"


def test_vision_steps_agree_and_the_tower_runs_once_an_image(capsys):
    with one_rank():
        found = vision_step.measured(vision_step.parse_arguments(VISION.split()), Layout())
    verdict, row = found["alignment"], found["row"]
    assert verdict["passed"] and verdict["executed_tokens"] < verdict["raw_tokens"]
    # Two groups of four rollouts with two images each; with gradients a second time.
    assert row["images"] == {"stock": 16, "prefix": 2 * 4}
    assert row["shared_steps"] == 1 and row["executed_tokens"] < row["raw_tokens"] / 2
    assert row["of_bound"] == pytest.approx(row["speedup"] / row["bound"])
    assert "aligned: True" in capsys.readouterr().out


GRAPH = "--device cpu --dtype float64 --model tiny-llama --layers 2 --repeats 1 --block 16"
GRAPH += " --shape 40:12:3 --check-shape 24:8:3 --pack-tokens 120"


def test_a_group_as_one_microbatch_trains_as_its_rollouts_do(tmp_path):
    path = tmp_path / "out.json"
    with one_rank():
        options = peers_step.parse_arguments([*GRAPH.split(), "--json", str(path)])
        assert peers_step.run(options) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    for name in ("prefix", "graph", "graph, answers"):
        verdict = report["verdicts"][name]
        assert verdict["passed"] and verdict["compared"]["gradients"] > 10
        assert verdict["compared"]["log-probs"] == 3 * 8
    assert all(row["ms"] > 0 and row["times_prefix"] > 0 for row in report["rows"])


SMALL = "--device cpu --dtype float32 --heads 4 --kv-heads 2 --dim 16 --repeats 1 --warm-up 1"
SMALL += " --shapes 3x48x16 --check-shape 3x40x16 --segment-tokens 32 --dense-tokens 130"
PEERS = ["ours", "dense-math", "flex", "repeated-math"]


def test_every_peer_computes_the_same_and_who_cannot_says_why(tmp_path, capsys):
    path = tmp_path / "out.json"
    names = ",".join([*PEERS, "dense-cudnn", "nobody"])
    assert peers.main([*SMALL.split(), "--json", str(path), "--peers", names]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert {name: report["wrong"][name] for name in PEERS} == dict.fromkeys(PEERS)
    found = {row["peer"]: row for row in report["rows"]}
    assert all(found[name]["total_ms"] > 0 for name in PEERS)
    (summary,) = report["summary"]
    assert summary["flop_ratio"] == pytest.approx(1.6)
    fastest = found["dense-math"]["total_ms"] / found["ours"]["total_ms"]
    assert summary["speedup"] == pytest.approx(fastest)
    assert found["dense-cudnn"]["reason"].startswith("cannot run: UserError: attention kernel")
    assert "peer 'nobody': give some of those in --help" in capsys.readouterr().out


# Ranks that share prompts, planned and simulated --------------------------------------------------


def table(capsys, monkeypatch, program, *arguments):
    monkeypatch.setattr(sys, "argv", ["program", BUNDLED, *arguments])
    program.main()
    titles, line, *found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert {*line} == {"---"}
    return [dict(zip(titles, row, strict=True)) for row in found]


def test_planning_across_ranks_is_timed_and_a_step_simulated(capsys, monkeypatch):
    options = ["--tokens", "6000", "--repeats", "1", "--ranks", "2", "3"]
    planned = table(capsys, monkeypatch, across_ranks_planning, *options)
    assert [row["ranks"] for row in planned] == ["2", "3"]
    for row in planned:
        assert int(row["common spans"]) > 0 and 0 < int(row["executed"]) < 6000
    simulated = table(capsys, monkeypatch, across_ranks_simulation, "--ranks", "2")
    assert [row["rollouts, dealt"] for row in simulated] == ["agents, length", "agents, random"]
    for row in simulated:
        for rate in ("50", "400"):
            some = row[f"{rate} GB/s: nothing hides, in order"].split(", ")
            assert all(0 < float(one) <= float(row["all hides"]) for one in some)


def bench(folder, file, model, names, **changes):
    """A result of `bench` with these rows, 400 ms stock and 100 ms with the prefix schedule."""
    row = {
        "segment_tokens": 4096, "raw_tokens": 20000, "executed_tokens": 5000, "speedup": 4.0,
        "bound": 5.0, "of_bound": 0.8, "stock_ms": 400.0, "prefix_ms": 100.0,
        "stock_step_ms": [400.0], "prefix_step_ms": [100.0], "mfu": 0.5,
        "phase_ms": {"A": 10.0, "B": 60.0, "C": 30.0, "wait": 0.0},
    }  # fmt: skip
    result = {
        "model": model, "set": ["num_layers=4"], "forward_only": False,
        "layout": {"tp": 1, "cp": 1, "pp": 1, "sequence_parallel": False},
        "rows": [row | {"name": name} for name in names.split()],
    }  # fmt: skip
    (folder / file).write_text(json.dumps(result | changes), encoding="utf-8")


def test_rows_stand_beside_what_was_published(tmp_path, capsys):
    bench(tmp_path, "caching.json", "qwen3-8b", "16384:128:9")
    bench(tmp_path, "grid.json", "llama3-8b", "10240:2048:8 16384:64:9", set=[])
    assert documents.main([str(tmp_path)]) == 0
    found = capsys.readouterr()
    lines, missing = found.out.splitlines(), found.err
    said = "4.00x | 5.00x | 0.800 | 400, 100 ms |"
    assert f"| 16,384, 128, n 9 | 7.3x | qwen3-8b | 4 | {said}" in lines
    assert f"| 16,384, 64, n 9 | 7.5x | llama3-8b | all | {said}" in lines
    [grid] = [line for line in lines if line.startswith("| 10240:2048:8 |")]
    assert grid.endswith(f"| 4,096 | {said} 10, 60, 30 | 0.500 |")
    assert "8,192, 4,096, n 9" in missing and "16,384, 64, n 9" not in missing


# The naive schedule that others are compared with -------------------------------------------------


@pytest.mark.parametrize(("p", "r", "n", "stages", "bubble"), [
    (10240, 2048, 16, 4, 0.46), (10240, 2048, 8, 4, 0.58), (10240, 2048, 8, 8, 0.76),
    (8192, 1024, 16, 4, 0.53),
])  # fmt: skip
def test_bubbles_with_barriers(p, r, n, stages, bubble):
    forest = build(*flat_rollouts(p, r, n, 4), TreeOptions(segment_tokens=r))
    plan = barrier_plan(forest, stages)
    simulate(plan, ready_after=loss_ready_after(forest))
    assert round(simulate_with_barriers(plan).bubble_fraction, 2) == bubble


def test_the_picture_is_what_its_command_draws():
    found = (REPOSITORY / "docs" / "schedules.svg").read_text(encoding="utf-8")
    assert found == picture(), "python -m benchmarks.pipeline_picture docs/schedules.svg"


def test_the_table_of_the_results_is_what_its_command_prints(capsys):
    pipeline_bubbles.main()
    assert capsys.readouterr().out in (REPOSITORY / "docs/results.md").read_text(encoding="utf-8")


# `step_trace compare` -----------------------------------------------------------------------------


LINES = ["aten.mm.default(a)", "view aten.t.default(b)", "aten.add.Tensor(c)", "x/y.py:1 f", ""]


def record():
    """Two configs, one of them with two ranks."""
    rank = {
        "operations": [0, 1, 2, 0], "places": [3, 4, 3, 4], "host waits": {"aten.nonzero": 2},
        "bytes": {"peak": 10}, "digests": {"gradient of w": "ab", "gradient of v": "cd"},
    }  # fmt: skip
    ranks = {"one": [rank], "two": [copy.deepcopy(rank), copy.deepcopy(rank)]}
    return {"made by": {"torch": "2"}, "lines": LINES, "configs": ranks}


def compared(folder, new, *options):
    """The exit code of the command for the record above and another one."""
    for name, value in (("old", record()), ("new", new)):
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return step_trace.main(["compare", str(folder / "old"), str(folder / "new"), *options])


def test_equal_records_pass_whatever_the_order_of_their_tables(tmp_path, capsys):
    new = record()
    new["lines"] = [*reversed(LINES)]
    for rank in (rank for config in new["configs"].values() for rank in config):
        for key in ("operations", "places"):
            rank[key] = [len(LINES) - 1 - number for number in rank[key]]
    assert compared(tmp_path, new) == 0
    assert capsys.readouterr().out == "the same: 2 configs, 3 ranks, 12 operations, 6 digests\n"


def test_the_first_difference_is_shown_and_all_are_counted(tmp_path, capsys):
    new = record()
    new["configs"]["two"][1]["operations"] = [0, 1, 0, 2, 2]
    new["configs"]["two"][1]["places"] = [3, 4, 3, 4, 4]
    assert compared(tmp_path, new) == 1
    assert capsys.readouterr().out.splitlines() == [
        "two, rank 1: operation 2 of 4 before, of 5 now", "  after view aten.t.default(b)",
        "  before aten.add.Tensor(c)  [x/y.py:1 f]", "  now    aten.mm.default(a)  [x/y.py:1 f]",
        "  counts +1 aten.add.Tensor",
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value", "told"), [
    ("digests", "gradient of v", "ce", "digests: gradient of v cd before, ce now"),
    ("host waits", "aten.item", 1, "host waits: aten.item None before, 1 now"),
    ("bytes", "peak", 11, "bytes: peak 10 before, 11 now"),
    ("cuda", "kernels", 7, "cuda: kernels None before, 7 now"),
])  # fmt: skip
def test_another_value_is_a_difference(tmp_path, capsys, kind, name, value, told):
    new = record()
    new["configs"]["one"][0].setdefault(kind, {})[name] = value
    assert compared(tmp_path, new) == 1
    assert capsys.readouterr().out == f"one, rank 0: {told}\n"


# Scripts, with programs that only note what they are asked to do ----------------------------------


def asked(folder, script, program, *arguments, **environment):
    """The words of every call of a program by a script of benchmarks/."""
    path, notes = folder / program, folder / "notes"
    path.write_text(f'#!/bin/bash\necho "${{@@Q}}" >>{notes}\n', encoding="utf-8")
    path.chmod(0o755)
    environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = run_script(REPOSITORY / "benchmarks" / script, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in notes.read_text("utf-8").splitlines()]


ROWS = "caching dualkv_layer dualkv_step dualkv_logprob moe_step moe_logprob dta"


@pytest.mark.parametrize(("chosen", "num"), [("", 7), (f"{ROWS} capacity", 8)])
def test_every_row_of_documents_is_a_command_that_bench_takes(tmp_path, chosen, num):
    arguments = (tmp_path, tmp_path / "out", *chosen.split())
    lines = asked(tmp_path, "documents_h200.sh", "python3", *arguments)
    commands = [line[2:] for line in lines if line[1:3] == ["megatron_prefix", "bench"]]
    for words in commands:
        args = make_parser("bench").parse_args(words)
        assert (args.device, args.dtype) == ("cuda", "bfloat16")
        options = model_options(args)
        assert presets.resolve(options.model, **dict(options.overrides)).vocab_size
        assert args.shapes or args.rollouts
        assert all(GroupShape.parse(text) for text in args.shapes)
    names = [Path(make_parser("bench").parse_args(one).bench_json).stem for one in commands]
    assert names == (chosen or ROWS).split() and len(names) == num


@pytest.mark.parametrize(("gpus", "num"), [(2, 16), (4, 13)])
def test_rows_over_nccl_fill_the_gpus_in_both_dtypes(tmp_path, gpus, num):
    arguments = (tmp_path / "out", "--allow-refused")
    known, dtypes = {row.name: row for row in rows()}, []
    for words in asked(tmp_path, "nccl_rows.sh", "torchrun", *arguments, NGPU=str(gpus)):
        option, ranks, _, module, *rest = words
        assert (option, ranks, module) == ("--nproc-per-node", str(gpus), "megatron_prefix")
        args = make_parser("matrix").parse_args(rest)
        assert args.device == "cuda" and args.allow_refused and len(args.only) == num
        assert args.record == str(tmp_path / "out" / f"{args.dtype}.jsonl")
        assert all(known[name].layout_in().world_size == gpus for name in args.only)
        dtypes.append(args.dtype)
    assert dtypes == ["bfloat16", "float32"]
