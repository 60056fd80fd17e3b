"""The command line: the verb `plan`, bad input, and bad usage of verbs that build no model."""

import gc
import gzip
import os
import threading
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_prefix.features.plan_files.table import from_csv
from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.forest import forest_of
from megatron_prefix.lab.plans.job import simulate_job
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.layers.model import cost_of
from tests.harness import data, fuzzing
from tests.harness.command_line import BUNDLED, failure, result, row, run
from tests.harness.trees import trie_size

EXACT = ["--align", "1", "--min-gain", "0"]


def test_plan_json_has_the_keys_of_the_contract_and_their_values(capsys):
    found = result(capsys, "plan", BUNDLED, *EXACT, "--share", "group")
    groups = list(read_groups(BUNDLED))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ratios = [rollout.prompt_len / len(rollout) for rollout in rollouts]
    trie = sum(trie_size([pairs_of(r) for r in group.rollouts]) for group in groups)
    assert found["rollouts"] == len(rollouts)
    assert found["groups"] == len(groups)
    assert found["raw_tokens"] == sum(len(rollout) - 1 for rollout in rollouts)
    assert found["executed_tokens"] == trie
    assert found["compression"] == found["raw_tokens"] / trie
    assert found["prefix_ratio_p50"] == pytest.approx(np.percentile(ratios, 50))
    assert found["prefix_ratio_p95"] == pytest.approx(np.percentile(ratios, 95))
    # Nothing but compression, fewer actions and a smaller output layer makes a step faster.
    unit = cost_of(resolve("llama3-8b")).forward
    most = found["compression"] + unit.actions / unit.positions * len(rollouts) / trie
    assert 2 < found["flop_ratio"] < most * (1 + unit.scored / unit.positions)
    assert 1 < found["predicted_speedup"] < found["flop_ratio"]
    # All in one bundle: a segment a level of the trees, the last one a wave.
    assert found["max_depth"] > 2
    assert found["segments"] == found["inner_segments"] + 1 == found["max_depth"]
    assert found["num_actions"] == 2 * found["segments"]
    assert found["makespan"] == 3 * trie
    assert found["bubble_fraction"] == 0
    assert found["peak_live_tokens"] == trie
    assert found["peak_live_bytes"] > found["peak_live_tokens"]


def test_plan_finds_what_was_measured(capsys):
    """The data's README gives whole sets, each file is half of one: the figures are near."""
    found = result(capsys, "plan", str(data.path("rag_musique")), *EXACT, "--share", "group")
    assert found["prefix_ratio_p50"] == pytest.approx(0.814, abs=0.06)
    assert found["prefix_ratio_p95"] == pytest.approx(0.986, abs=0.06)
    assert found["compression"] == pytest.approx(4.33, rel=0.08)


def test_plan_says_what_the_sidecar_takes_here_and_on_the_host(capsys):
    """K/V and states of all layers of a hybrid model, of half of them, of none."""
    usual = ["plan", BUNDLED, "--model", "qwen3-next-80b-a3b"]
    here, half, none = (result(capsys, *usual, "--cache-host-layers", str(n)) for n in (0, 24, 48))
    whole = here["sidecar_bytes"]
    assert 0 == none["sidecar_bytes"] < half["sidecar_bytes"] < whole == none["sidecar_host_bytes"]
    assert half["sidecar_bytes"] + half["sidecar_host_bytes"] == whole
    assert here["inner_segments"] * 36 * (2 << 20) < whole
    assert "leave one of them out" in failure(
        capsys, *usual, "--cache-host-layers", "1", "--cp", "2"
    )


def test_several_files_make_one_step_and_groups_limits_it(capsys, tmp_path):
    other = tmp_path / "other.jsonl"
    made = result(capsys, "generate", str(other), "--groups", "3", "--seed", "5")
    whole = result(capsys, "plan", BUNDLED, str(other))
    assert whole["groups"] == 8 + 3
    assert whole["rollouts"] == 53 + made["rollouts"]
    assert result(capsys, "plan", BUNDLED, str(other), "--groups", "2")["groups"] == 2
    assert result(capsys, "plan", str(other), "--groups", "9")["groups"] == 3


def test_options_reach_the_tree(capsys):
    plain = result(capsys, "plan", BUNDLED, *EXACT)
    for arguments, key, wanted in (
        (["--align", "16"], "align", 16),
        (["--chunk-tokens", "64"], "chunk_tokens", 64),
        (["--tp", "2", "--sequence-parallel", "--cp", "2"], "align", 8),
        (["--tp", "2"], "align", 1),
        (["--cp", "4"], "align", 8),
        (["--pp", "4"], "num_stages", 4),
        (["--pp", "2", "--vpp", "2"], "num_stages", 4),
    ):
        assert result(capsys, "plan", BUNDLED, *arguments)[key] == wanted
    for arguments in (["--min-gain", "500"], ["--align", "64"], ["--loss-in-leaves"]):
        found = result(capsys, "plan", BUNDLED, *EXACT, *arguments)
        assert found["executed_tokens"] > plain["executed_tokens"]
        assert found["raw_tokens"] == plain["raw_tokens"]
    cut = result(capsys, "plan", BUNDLED, *EXACT, "--segment-tokens", "100", "--chunk-tokens", "50")
    assert cut["segments"] > plain["segments"]
    assert cut["executed_tokens"] == plain["executed_tokens"]
    assert 0 < cut["peak_live_tokens"] < plain["peak_live_tokens"]
    short = ("--wave-tokens", "100", "--chunk-tokens", "50")  # the option's name before
    assert result(capsys, "plan", BUNDLED, *EXACT, *short) == cut
    twice = result(capsys, "plan", BUNDLED, *EXACT, "--share", "batch")
    assert twice["executed_tokens"] <= plain["executed_tokens"]
    many = ("plan", BUNDLED, "--pp", "4", "--segment-tokens", "200")
    ahead = [result(capsys, *many, "--extra", e)["makespan"] for e in "12"]
    assert ahead[0] != ahead[1]


@pytest.fixture
def long(capsys, tmp_path):
    """Three groups with prompts of 4,096 tokens."""
    path = str(tmp_path / "long.jsonl.gz")
    made = ("--prompt-tokens", "4096", "--response-tokens", "900", "--rollouts", "6", "--groups")
    result(capsys, "generate", path, *made, "3", "--seed", "1")
    return path


def test_auto_looks_for_lengths_of_chunks_and_of_segments(capsys, long):
    """Those of chunks alone left stages waiting 42.9 % of the time, 15.8 % with short segments."""
    options = ("plan", long, "--pp", "4")
    plain, auto = result(capsys, *options), result(capsys, *options, "--chunk-tokens", "auto")
    # Without chunks, too, segments are shorter than 16,384, as in a run, until each stage has four.
    assert 0.25 < plain["bubble_fraction"] < 0.4 and auto["bubble_fraction"] < 0.2
    assert auto["segment_tokens"] < plain["segment_tokens"] == 4096
    lengths = (str(auto[name]) for name in ("chunk_tokens", "segment_tokens"))
    fixed = ("--chunk-tokens", next(lengths), "--segment-tokens", next(lengths))
    assert result(capsys, *options, *fixed) == auto
    alone = result(capsys, *options, "--segment-tokens", "auto")
    assert alone["chunk_tokens"] == 0 and alone["bubble_fraction"] <= plain["bubble_fraction"]
    assert alone["predicted_speedup"] >= plain["predicted_speedup"]


def test_parts_that_may_take_long_are_counted_on_stderr(capsys):
    layout = ("--dp", "2", "--pp", "2", "--vpp", "2")
    _, _, err = run(capsys, "plan", BUNDLED, *layout, "--progress", "--json")
    lines = [line.partition(",")[0] for line in err.splitlines()]
    assert lines[1:3] == ["ranks dealt: 2 of 2", "lengths of segments planned: 5 of 5"]
    assert lines[3:] == ["ranks' memory predicted: 2 of 2"] and gc.isenabled()


def test_model_chunks_that_cost_time_are_named(capsys):
    few, many = ["plan", BUNDLED, "--pp", "2", "--vpp", "2"], ["plan", BUNDLED, "--pp", "8"]
    slower = result(capsys, *few)["time_over_one_chunk"]
    assert slower > 1
    _, out, _ = run(capsys, *few)
    assert f"--vpp 2 is predicted to take {slower - 1:.1%} longer than --vpp 1" in out
    assert result(capsys, *many)["time_over_one_chunk"] is None
    assert result(capsys, *many, "--vpp", "4")["time_over_one_chunk"] < 1


def test_csv_and_svg_are_what_was_planned(capsys, tmp_path):
    csv, svg = tmp_path / "plan.csv", tmp_path / "plan.svg"
    arguments = ["plan", BUNDLED, "--pp", "4", "--csv", str(csv), "--svg", str(svg)]
    found = result(capsys, *arguments)
    plan = from_csv(csv.read_text(encoding="utf-8"))
    assert simulate(plan).makespan == found["makespan"]
    assert len(plan.segments) == found["segments"]
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "agents.jsonl.gz: 8 groups, 4 stages" in svg.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.csv", "plan.svg"]
    code, out, err = run(capsys, "plan", BUNDLED, "--pp", "4", "--csv", "-")
    assert (code, out) == (0, csv.read_text(encoding="utf-8"))
    assert "compression" in err


def test_rollouts_may_come_through_a_pipe():
    """`plan <(zcat rollouts.jsonl.gz)`."""
    content = gzip.decompress(Path(BUNDLED).read_bytes())
    read, write = os.pipe()

    def feed():
        with os.fdopen(write, "wb") as file:
            file.write(content)

    writer = threading.Thread(target=feed)
    writer.start()
    assert fuzzing.ended("plan", f"/dev/fd/{read}", "--json") == (0, "")
    os.close(read)
    writer.join()


BAD_FILES = {
    "no JSON": (b"{", ":1: row: not JSON"),
    "truncated gzip": (gzip.compress(row().encode())[:-9], ": gzip: truncated or corrupt"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_rollouts_fail_with_one_line_and_write_nothing(capsys, tmp_path, content, message):
    path, csv = tmp_path / "bad.jsonl", tmp_path / "plan.csv"
    path.write_bytes(content)
    csv.write_text("before", encoding="utf-8")
    for more in ([], ["--json"], ["--csv", str(csv), "--svg", str(tmp_path / "plan.svg")]):
        line = failure(capsys, "plan", str(path), *more)
        assert line.startswith(f"megatron-prefix plan: {path}:")
        assert message in line
    assert csv.read_text(encoding="utf-8") == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "plan.csv"]


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "megatron-prefix: the following arguments are required: VERB"),
    (["plan"], "megatron-prefix plan: the following arguments are required: ROLLOUTS"),
    (["plan", "x", "--pp", "0"], "argument --pp: '0' is not an integer from 1"),
    (["plan", "x", "--chunk-tokens", "some"], "'some' is neither 'auto' nor an integer"),
    (["align", "--rollouts", "x", "--share", "group"], "unrecognized arguments: --share group"),
    (["plan", "/no/such/file"], "megatron-prefix plan: /no/such/file: cannot be read"),
    (["plan", BUNDLED, "--vpp", "2"], "--vpp 2 needs --pp of at least 2"),
    (["plan", BUNDLED, "--csv", "-", "--json"], "--csv - and --json both write to stdout"),
    (["show", "/no/such/plan.csv"], "megatron-prefix show: /no/such/plan.csv: cannot be read"),
    (["show", BUNDLED], "not a plan: it is not text in UTF-8"),
    (["bench", "--steps", "2"], "--steps is for rollout files"),
    (["bench", "--rehearse"], "--rehearse needs --steps"),
    (["bench", "--rollouts", BUNDLED, "--groups", "4", "--steps", "99"], "too few for --steps 99"),
    (["bench", "--rollouts", BUNDLED, "--step-tokens", "10000000", "--steps", "1"], "too few for"),
    (["bench", "memory", "--ways", "nothing"], "give one of stock, retain"),
    (["bench", "memory", "--cp", "2"], "bench memory runs on one rank"),
    (["bench", "memory", "--chunk-tokens", "auto"], "--chunk-tokens auto: give a number"),
    (["bench", "memory", "--rollouts", "x.jsonl"], "bench memory runs synthetic shapes"),
    (["bench", "memory", "--capacity-gb", "-1"], "from 0"),
    (["matrix", "--only", "dense/TP3/*"], "matches no row; layouts: TP2"),
])  # fmt: skip
def test_bad_usage_is_one_line_and_exit_code_2(capsys, arguments, message):
    line = failure(capsys, *arguments)
    assert line.startswith("megatron-prefix")
    assert message in line


# Data-parallel ranks of a dealt step --------------------------------------------------------------


@pytest.mark.parametrize("how", ["groups", "random"])
def test_ranks_have_all_rollouts_and_the_slowest_is_planned(capsys, how):
    found = result(capsys, "plan", BUNDLED, *EXACT, "--dp", "3", "--deal", how)
    ranks = found["data_parallel"]
    whole = [pairs_of(one) for group in read_groups(BUNDLED) for one in group.rollouts]
    assert ranks["deal"] == how
    assert len(ranks["executed_tokens"]) == 3
    assert sum(ranks["rollouts"]) == len(whole) == 53
    assert sum(ranks["raw_tokens"]) == sum(map(len, whole))
    assert ranks["executed_tokens_across_ranks"] == trie_size(whole)
    planned = ranks["planned_rank"]
    for name in ("rollouts", "raw_tokens", "executed_tokens"):
        assert found[name] == ranks[name][planned]
    assert found["executed_tokens"] == max(ranks["executed_tokens"])
    assert ranks["speedup"] == max(ranks["raw_tokens"]) / max(ranks["executed_tokens"])
    assert 1 < ranks["speedup"] <= ranks["speedup_across_ranks"]
    again = result(capsys, "plan", BUNDLED, *EXACT, "--dp", "3", "--deal", how)
    assert again == found


def test_plans_of_all_ranks_are_written(capsys, tmp_path):
    folder = tmp_path / "plans"
    options = ["--dp", "2", "--deal", "length", "--segment-tokens", "200", "--min-gain", "8"]
    alone = result(capsys, "plan", BUNDLED, *options)
    assert alone["data_parallel"]["across_ranks"] is None
    options += ["--across-ranks", "on", "--output", str(folder)]
    found = result(capsys, "plan", BUNDLED, *options)
    across = found["data_parallel"].pop("across_ranks")
    del alone["data_parallel"]["across_ranks"]
    assert found == alone
    names = ["plan.json", "plan.svg", "rank-0.csv", "rank-1.csv"]
    assert sorted(path.name for path in folder.iterdir()) == names
    plans = [from_csv((folder / f"rank-{rank}.csv").read_text(encoding="utf-8")) for rank in (0, 1)]
    timeline = simulate_job(plans)
    assert across["busy"] == [*timeline.busy]
    assert across["executed_tokens"] == [forest_of(plan).executed_tokens for plan in plans]
    assert across["received_tokens"] == [forest_of(plan).received_tokens for plan in plans]
    assert across["sent_tokens"] == across["received_tokens"][::-1]
    assert sum(across["received_tokens"]) > 0
    assert across["makespan"] > timeline.makespan  # messages take time
    _, out, _ = run(capsys, "plan", BUNDLED, *options)
    assert "across ranks, simulated with messages at 50 GB/s, tokens" in out
    assert BUNDLED.rpartition("/")[2] in (folder / "plan.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("layout", "setting"), [("--pp 2 --vpp 2", "on"), ("--ep 2", "auto"), ("--cp 2", "on")]
)
def test_ranks_of_every_layout_are_planned(capsys, layout, setting):
    options = ["--dp", "2", "--deal", "random", "--min-gain", "8", *layout.split()]
    options += ["--across-ranks", setting]
    found = result(capsys, "plan", BUNDLED, *options)["data_parallel"]
    across = found["across_ranks"]
    assert sum(across["executed_tokens"]) < sum(found["executed_tokens"])
    assert sum(across["received_tokens"]) == sum(across["sent_tokens"]) > 0
    assert across["speedup"] == max(found["raw_tokens"]) / max(across["executed_tokens"])
    assert found["speedup"] < across["speedup"]
    simulated = layout == "--cp 2"
    assert (across["makespan"] is not None) == simulated
    _, out, _ = run(capsys, "plan", BUNDLED, *options)
    assert f"across ranks, {'simulated with messages at 50 GB/s, ' * simulated}tokens" in out
    assert f"{across['speedup']:.2f}x" in out
