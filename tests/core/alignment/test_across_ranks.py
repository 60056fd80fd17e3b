"""Prompts whose rollouts are on several data-parallel ranks run once, with the stock schedule's
losses and gradients."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable

import pytest

from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.data.shorten import shorten
from tests.harness.command_line import BUNDLED, forked, run
from tests.harness.data import REPOSITORY
from tests.harness.rows import rows
from tests.harness.trees import trie_size

pytestmark = pytest.mark.turns

SMALL = "--groups 2 --max-tokens 96 --set num_layers=2 --min-gain 8 --dtype float64 --json"
LAYOUTS = {
    "packs": "--dp 2 --groups 3",  # where all that is common carries loss
    "rows": "--dp 2 --baseline rollout",
    "by length": "--dp 2 --deal length",
    "short segments": "--dp 2 --segment-tokens 64 --pack-tokens 128",
    "chunks": "--dp 2 --chunk-tokens 32",
    "recomputed": "--dp 2 --memory recompute",
    "overlapped reduction": "--dp 2 --overlap-grad-reduce",
    "sequence parallel": "--dp 2 --tp 2 --sequence-parallel",
    "pipeline": "--dp 2 --pp 2",
    "three ranks": "--dp 3",
    "four ranks": "--dp 4",
    "shards of a pipeline": "--dp 2 --tp 2 --pp 2",
    "virtual stages": "--dp 2 --pp 2 --vpp 2 --set num_layers=4",
    "context parallel": "--dp 2 --cp 2 --cp-reduce wave",
    "context parallel, gathered": "--dp 2 --cp 2 --cp-reduce segment --chunk-tokens 32",
    "expert parallel": "--dp 2 --ep 2 --model tiny-moe",
    "host layers": "--dp 2 --cache-host-layers 2",
    "windows": "--dp 2 --model tiny-gpt-oss",
    "windows, context parallel": "--dp 2 --cp 2 --model tiny-gpt-oss --set num_moe_experts=none",
    "latents": "--dp 2 --model tiny-deepseek --set num_moe_experts=none",
    "multi-token prediction": "--dp 2 --set mtp_num_layers=1",
    "multi-token prediction, context parallel": "--dp 2 --cp 2 --set mtp_num_layers=1",
    "GatedDeltaNet": "--dp 2 --model tiny-qwen3-next --baseline rollout",
    "Mamba": "--dp 2 --model tiny-nemotron-h --set num_layers=4 --baseline rollout",
}

# Rows stand with GatedDeltaNet, a deal by length below, stages with virtual ones, more than two
# ranks as three, segments that are recomputed in test_moe.py.
PRODUCTS = ("rows", "by length", "recomputed", "pipeline", "four ranks", "shards of a pipeline",
            "windows, context parallel", "multi-token prediction, context parallel")  # fmt: skip


KEYS, STATES = 2 * 2 * 2 * 16, 64
"""Numbers of a position: K and V of two layers and two heads, and final hidden states where what
rollouts have in common carries loss; with gradients twice as many cross."""


Result = Callable[[str], dict]


@pytest.fixture
def aligned(capsys: pytest.CaptureFixture[str]) -> Result:
    """What `align` prints; ranks are forked here, which spares them the imports."""

    def align(options: str) -> dict:
        if options in ALONE:
            return ALONE[options]
        arguments = ["--rollouts", BUNDLED, *SMALL.split(), *options.split()]
        code, out, err = run(capsys, "align", *arguments)
        assert code == 0, err
        found = json.loads(out)
        if "--across-ranks off" in options:
            ALONE[options] = found
        return found

    return align


ALONE: dict[str, dict] = {}
"""What ranks do alone, by what it depends on."""
DEALING = ("--dp", "--groups", "--baseline", "--deal", "--segment-tokens", "--pack-tokens",
           "--chunk-tokens", "--tp", "--sequence-parallel", "--cp")  # fmt: skip
"""What decides which positions a rank has and computes when it is alone; the model does not."""


def dealt(options: str) -> str:
    """Those of the options that decide it."""
    words = re.findall(r"--[\w-]+(?: [^-\s]\S*)?", options)
    return " ".join(word for word in words if word.split()[0] in DEALING)


@pytest.mark.parametrize("layout", rows(LAYOUTS, PRODUCTS))
def test_a_prompt_runs_once_in_the_job(layout: str, aligned: Result) -> None:
    options = LAYOUTS[layout]
    if "--deal" not in options:
        options += " --deal random"
    alone = aligned(f"{dealt(options)} --across-ranks off --set num_layers=1")
    across = aligned(f"{options} --across-ranks on")
    assert across["passed"]
    assert across["raw_tokens"] == alone["raw_tokens"]
    assert across["executed_tokens"] < alone["executed_tokens"]
    assert alone["received_tokens"] == alone["received_bytes"] == 0
    assert across["received_tokens"] > 0
    if layout == "packs":
        assert across["received_bytes"] == across["received_tokens"] * 2 * (KEYS + STATES) * 8


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
