"""The command line: `plan --dp` shows every data-parallel rank of a dealt step."""

import pytest

from megatron_prefix.features.plan_files.table import from_csv
from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.plans.forest import forest_of
from megatron_prefix.lab.plans.job import simulate_job
from tests.harness.command_line import BUNDLED, result, run
from tests.harness.trees import trie_size

EXACT = ["--align", "1", "--min-gain", "0"]


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
