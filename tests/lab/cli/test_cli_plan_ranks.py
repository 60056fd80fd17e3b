"""The command line: `plan --dp` shows every data-parallel rank of a dealt step."""

from __future__ import annotations

import pytest

from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.plan.actions import Plan
from tests.harness import data
from tests.harness.command_line import BUNDLED, failure, result, run
from tests.harness.trees import trie_size

EXACT = ["--align", "1", "--min-gain", "0"]


def test_one_rank_deals_nothing(capsys) -> None:
    assert result(capsys, "plan", BUNDLED)["data_parallel"] is None
    assert "data-parallel" not in run(capsys, "plan", BUNDLED)[1]


@pytest.mark.parametrize("how", ["groups", "length", "random"])
def test_ranks_have_all_rollouts_and_the_slowest_is_planned(capsys, how) -> None:
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


def test_the_seed_is_of_a_random_deal(capsys) -> None:
    def tokens(how: str, seed: str) -> list[int]:
        options = ("--dp", "2", "--deal", how, "--seed", seed)
        return result(capsys, "plan", BUNDLED, *options)["data_parallel"]["raw_tokens"]

    assert tokens("random", "1") != tokens("random", "2")
    assert tokens("length", "1") == tokens("length", "2")


def test_length_loses_what_was_measured(capsys) -> None:
    """verl's dealing at DP 8, 64 groups of 16: 1.77x where whole groups have 4.09x (README of the
    data: other options of the tree)."""
    path = str(data.path("rag_musique"))
    options = ("plan", path, "--groups", "64", "--dp", "8", "--deal")
    ranks = result(capsys, *options, "length")["data_parallel"]
    assert set(ranks["rollouts"]) == {128}
    assert ranks["speedup"] == pytest.approx(1.77, abs=0.05)
    assert 4.2 < ranks["speedup_across_ranks"] < 4.6
    assert result(capsys, *options, "groups")["data_parallel"]["speedup"] > 4


def test_experts_make_data_parallel_ranks(capsys) -> None:
    assert len(result(capsys, "plan", BUNDLED, "--ep", "2")["data_parallel"]["rollouts"]) == 2


def test_people_get_a_table_of_ranks_and_the_plan_of_one(capsys, tmp_path) -> None:
    svg = tmp_path / "plan.svg"
    options = ("--dp", "2", "--deal", "length", "--csv", "-", "--svg", str(svg))
    code, out, err = run(capsys, "plan", BUNDLED, *options)
    assert code == 0 and Plan.from_csv(out).num_ranks == 1
    assert "2 data-parallel ranks, --deal length" in err and "slowest rank, across ranks" in err
    assert "data-parallel rank" in svg.read_text(encoding="utf-8")


def test_more_ranks_than_rollouts_are_refused(capsys) -> None:
    line = failure(capsys, "plan", BUNDLED, "--groups", "1", "--dp", "1000000")
    assert "--dp 1000000 (and --ep 1): the step has" in line
    line = failure(capsys, "plan", BUNDLED, "--dp", "2", "--deal", "size")
    assert "argument --deal: invalid choice: 'size'" in line
