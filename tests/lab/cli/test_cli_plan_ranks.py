"""The command line: `plan --dp` shows every data-parallel rank of a dealt step."""

import pytest

from megatron_prefix.features.plan_files.table import from_csv
from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.plans.forest import forest_of
from megatron_prefix.lab.plans.job import simulate_job
from tests.harness import data
from tests.harness.command_line import BUNDLED, failure, result, run
from tests.harness.trees import trie_size

EXACT = ["--align", "1", "--min-gain", "0"]


def test_one_rank_deals_nothing(capsys):
    assert result(capsys, "plan", BUNDLED)["data_parallel"] is None
    assert "data-parallel" not in run(capsys, "plan", BUNDLED)[1]


@pytest.mark.parametrize("how", ["groups", "length", "random"])
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


def test_the_seed_is_of_a_random_deal(capsys):
    def tokens(how, seed):
        options = ("--dp", "2", "--deal", how, "--seed", seed)
        return result(capsys, "plan", BUNDLED, *options)["data_parallel"]["raw_tokens"]

    assert tokens("random", "1") != tokens("random", "2")
    assert tokens("length", "1") == tokens("length", "2")


def test_length_loses_what_was_measured(capsys):
    """verl's dealing at DP 8, 64 groups of 16: 1.77x where whole groups have 4.09x (README of the
    data: other options of the tree)."""
    path = str(data.path("rag_musique"))
    options = ("plan", path, "--groups", "64", "--dp", "8", "--deal")
    ranks = result(capsys, *options, "length")["data_parallel"]
    assert set(ranks["rollouts"]) == {128}
    assert ranks["speedup"] == pytest.approx(1.77, abs=0.05)
    assert 4.2 < ranks["speedup_across_ranks"] < 4.6
    assert result(capsys, *options, "groups")["data_parallel"]["speedup"] > 4


def test_experts_make_data_parallel_ranks(capsys):
    assert len(result(capsys, "plan", BUNDLED, "--ep", "2")["data_parallel"]["rollouts"]) == 2


def test_people_get_a_table_of_ranks_and_the_plan_of_one(capsys, tmp_path):
    svg = tmp_path / "plan.svg"
    options = ("--dp", "2", "--deal", "length", "--csv", "-", "--svg", str(svg))
    code, out, err = run(capsys, "plan", BUNDLED, *options)
    assert code == 0 and from_csv(out).num_ranks == 1
    assert "2 data-parallel ranks, --deal length" in err and "slowest rank, across ranks" in err
    assert "data-parallel rank" in svg.read_text(encoding="utf-8")


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
    ("options", "message"),
    [
        (["--output", "x"], "--output is for plans of ranks that share prompts"),
        (["--output", "x", "--dp", "2"], "--output is for plans of ranks that share prompts"),
        (["--output", "x", "--across-ranks", "on"], "give --dp of at least 2"),
        (
            ["--dp", "2", "--pp", "2", "--across-ranks", "on", "--output", "x"],
            "leave --pp and --ep out",
        ),
        (["--dp", "2", "--across-ranks", "on", "--output", __file__], "cannot be written"),
    ],
)
def test_plans_of_ranks_that_cannot_be_made(capsys, options, message):
    assert message in failure(capsys, "plan", BUNDLED, *options)


@pytest.mark.parametrize(
    ("layout", "setting"),
    [("--pp 2 --vpp 2", "on"), ("--ep 2", "auto"), ("--cp 2", "on"), ("--tp 2", "on")],
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
    simulated = layout in ("--cp 2", "--tp 2")
    assert (across["makespan"] is not None) == simulated
    _, out, _ = run(capsys, "plan", BUNDLED, *options)
    assert f"across ranks, {'simulated with messages at 50 GB/s, ' * simulated}tokens" in out
    assert f"{across['speedup']:.2f}x" in out


def test_more_ranks_than_rollouts_are_refused(capsys):
    line = failure(capsys, "plan", BUNDLED, "--groups", "1", "--dp", "1000000")
    assert "--dp 1000000 (and --ep 1): the step has" in line
    line = failure(capsys, "plan", BUNDLED, "--dp", "2", "--deal", "size")
    assert "argument --deal: invalid choice: 'size'" in line
