"""Prompts whose rollouts are on several data-parallel ranks run once, with the stock schedule's
losses and gradients."""

from __future__ import annotations

import itertools
import json

import pytest

from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.data.shorten import shorten
from tests.harness.command_line import BUNDLED, forked, run
from tests.harness.data import REPOSITORY
from tests.harness.trees import trie_size

pytestmark = pytest.mark.turns

SMALL = "--groups 2 --max-tokens 96 --set num_layers=2 --min-gain 8 --dtype float64 --json"


KEYS, STATES = 2 * 2 * 2 * 16, 64
"""Numbers of a position: K and V of two layers and two heads, and final hidden states where what
rollouts have in common carries loss; with gradients twice as many cross."""


def test_nothing_runs_twice_if_nothing_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    """What `plan` says, and the positions of one trie of the rollouts of both ranks."""
    options = ["--dp", "2", "--deal", "length", "--across-ranks", "on"]
    options += ["--groups", "3", "--max-tokens", "300", "--min-gain", "0", "--align", "1", "--json"]
    code, out, err = run(capsys, "plan", BUNDLED, *options)
    assert code == 0, err
    planned = json.loads(out)["data_parallel"]
    model = ["--set", "num_layers=1", "--dtype", "float64"]
    code, out, err = run(capsys, "align", "--rollouts", BUNDLED, *options, *model)
    assert code == 0, err
    found = json.loads(out)
    kept = [shorten(group, 300)[0] for group in itertools.islice(read_groups(BUNDLED), 3)]
    rollouts = [pairs_of(one) for group in kept if group for one in group.rollouts]
    copies = len(rollouts) - len({one.codes().tobytes() for one in rollouts})
    assert found["passed"] and copies == 0  # the last position of each runs on its own rank
    assert sum(planned["across_ranks"]["executed_tokens"]) == found["executed_tokens"]
    assert found["executed_tokens"] == trie_size(rollouts)


def test_what_is_timed_says_what_crossed() -> None:
    options = [*SMALL.split(), "--dp", "2", "--deal", "random", "--across-ranks", "on"]
    options[options.index("float64")] = "float32"
    done = forked("bench", "--rollouts", BUNDLED, *options, "--repeats", "1")
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)["rows"]
    assert row["received_tokens"] > 0
    scored, rest = divmod(row["received_bytes"] // (2 * 4) - row["received_tokens"] * KEYS, STATES)
    assert rest == 0 < scored <= row["received_tokens"]


def test_what_cannot_cross_is_refused() -> None:
    plan = next((REPOSITORY / "schedules").glob("*.csv"))
    options = f"--dp 2 --deal random --across-ranks on --prefix-plan {plan}"
    done = forked("align", "--rollouts", BUNDLED, *SMALL.split(), *options.split())
    assert done.returncode == 2
    assert "across_ranks with a plan file" in done.stderr
