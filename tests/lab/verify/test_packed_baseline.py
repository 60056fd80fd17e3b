"""Packed microbatches, and rollouts dealt to ranks without regard to their groups: the stock
schedule's log-probs, and `align` on them."""

import itertools
import json

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.data.shorten import shorten
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.rl import packing, passes
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from tests.harness.command_line import BUNDLED, forked
from tests.harness.ranks import run_ranks
from tests.harness.trees import trie_size

VOCAB = 64
CASES = [
    ("tiny-gpt-oss", Layout()), ("tiny-deepseek", Layout()),
    ("tiny-qwen3", Layout(tp=2, cp=2, sequence_parallel=True)),
]  # fmt: skip
"""Windows with sinks; keys and values of other widths; slices of ranks."""


def on_rank(name, layout):
    """Largest difference of a log-prob between packs and single rollouts, stock schedule."""
    runtime.initialize(layout)
    spec = resolve(name, num_layers=2).with_vocab(VOCAB)
    chunks = build_model(spec, layout=layout, dtype="float64")
    groups = list(generate(2, 12, 9, 3, uneven=True, vocab_size=VOCAB))
    items = align.on_this_cp_rank(align.microbatches(groups, 0, layout.alignment))
    packs = packing.microbatches(items, Baseline("packed", 64), cp_size=layout.cp)
    assert 1 < len(packs) < len(items)
    found = [passes.logprobs(get_forward_backward_func(), chunks, some) for some in (items, packs)]
    runtime.shutdown()
    single, packed = map(np.concatenate, found)
    return float(np.abs(single - packed).max())


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_packed_rollout_has_the_log_probs_it_has_alone(name, layout):
    limit = tolerance(torch.float64, 64)
    assert max(run_ranks(layout.world_size, on_rank, name, layout)) <= limit


def aligned(text):
    """In a process of its own: a world of one rank would run in this one."""
    arguments = f"--groups 2 --max-tokens 96 --set num_layers=1 --json --progress {text}".split()
    done = forked("align", "--rollouts", BUNDLED, *arguments)
    assert done.returncode == 0, done.stderr
    assert "draws aligned: 1 of 1" in done.stderr
    result = json.loads(done.stdout)
    assert result["passed"] and result["grad_max_rel_diff"] < 1e-12
    assert result["compared"]["losses"] == result["microbatches"]
    return result


def test_packs_are_the_default_and_both_schedules_run_them():
    whole, small, single = map(aligned, ("", "--pack-tokens 300", "--baseline rollout"))
    assert [one["baseline"] for one in (whole, small, single)] == ["packed", "packed", "rollout"]
    assert [one["pack_tokens"] for one in (whole, small, single)] == [16384, 300, 0]
    assert whole["microbatches"] == 1 < small["microbatches"] < single["microbatches"]
    assert whole["executed_tokens"] == single["executed_tokens"] < whole["raw_tokens"]


@pytest.mark.parametrize("text", ["--pp 2 --vpp 2 --set num_layers=4", "--ep 2 --model tiny-moe"])
def test_ranks_that_must_have_as_many_microbatches_do(text):
    assert aligned(f"--pack-tokens 200 {text}")["microbatches"] % 2 == 0


def test_scattered_groups_share_what_their_ranks_have():
    """Positions of each rank's tries, up to the last loss of each rollout."""
    found = aligned("--max-tokens 64 --min-gain 0 --dp 2 --deal length")
    assert found["deal"] == "length"
    groups = [shorten(group, 64)[0] for group in itertools.islice(read_groups(BUNDLED), 2)]
    assert found["raw_tokens"] == sum(len(r) - 1 for group in groups for r in group.rollouts)
    spec, config = resolve("tiny-llama"), PrefixConfig(min_gain=0)
    ranks = deal(groups, spec, Layout(dp=2), config, "length", stock=False, seed=1234)
    pairs = [pairs_of_groups(rank, tails=False)[0] for rank in ranks]
    assert found["executed_tokens"] == sum(map(trie_size, pairs))
