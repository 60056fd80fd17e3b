"""Verbs that run a model on rollouts that were dealt to ranks without regard to their groups."""

import itertools
import json

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.cli.main import make_parser
from megatron_prefix.lab.cli.training import settings_of
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.data.shorten import shorten
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.dealing import DEALS, deal
from megatron_prefix.lab.runtime import Layout
from tests.harness.command_line import BUNDLED, forked
from tests.harness.trees import trie_size

SEED = 1234
"""The default of the verbs."""


def tries(groups, how, *, stock=False):
    """What the rollouts of each of two ranks share, and no more: positions of the ranks' tries up
    to the last loss of each."""
    spec, config = resolve("tiny-llama"), PrefixConfig(min_gain=0)
    ranks = deal(groups, spec, Layout(dp=2), config, how, stock=stock, seed=SEED)
    pairs = [pairs_of_groups(rank, tails=False)[0] for rank in ranks]
    return sum(map(trie_size, pairs))


@pytest.mark.parametrize(("how", "baseline"), [("length", "packed"), ("random", "rollout")])
def test_both_schedules_agree_on_scattered_groups(how, baseline):
    options = f"--groups 2 --max-tokens 64 --set num_layers=1 --min-gain 0 --baseline {baseline}"
    done = forked(
        "align", "--rollouts", BUNDLED, *options.split(), "--dp", "2", "--deal", how, "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] and found["grad_max_rel_diff"] < 1e-12
    assert found["deal"] == how
    groups = [shorten(group, 64)[0] for group in itertools.islice(read_groups(BUNDLED), 2)]
    assert found["raw_tokens"] == sum(len(r) - 1 for group in groups for r in group.rollouts)
    assert found["executed_tokens"] == tries(groups, how, stock=baseline == "rollout")


def test_bench_times_what_was_dealt():
    options = "--shapes 48:8:4 --dp 2 --repeats 1 --warm-up-calls 1 --align-layers 1 --min-gain 0"
    done = forked("bench", *options.split(), "--set", "num_layers=1", "--deal", "length", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["deal"] == "length"
    (row,) = found["rows"]
    groups = GroupShape(48, 8, 4).groups(2, 2048, SEED)
    assert row["raw_tokens"] == 8 * 55
    # Two groups of four equal lengths, in turn: both prompts on both ranks.
    assert row["executed_tokens"] == tries(groups, "length") > 4 * 46 + 8 * 8


@pytest.mark.parametrize("verb", ["align", "bench", "train", "replay", "matrix", "plan"])
def test_groups_stay_together_unless_told_otherwise(verb):
    files = {"align": ["--rollouts", "x"], "bench": [], "matrix": []}.get(verb, ["x"])
    parser = make_parser(verb)
    assert parser.parse_args([verb, *files]).deal == "groups"
    for how in DEALS:
        assert parser.parse_args([verb, *files, "--deal", how]).deal == how


def test_train_deals_as_told():
    args = make_parser("train").parse_args(["train", BUNDLED, "--deal", "random"])
    baseline = settings_of(args, 1).baseline
    assert (baseline.name, baseline.deal) == ("rollout", "random")
