"""The stock schedule on packed microbatches: the rollouts' own log-probs, and `align` on them."""

import json

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.lab.rl import packing, passes
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from tests.harness.command_line import BUNDLED, forked
from tests.harness.ranks import run_ranks

VOCAB = 64
LAYOUTS = {
    "one rank": Layout(), "TP2 SP": Layout(tp=2, sequence_parallel=True), "CP2": Layout(cp=2),
    "TP2 SP CP2": Layout(tp=2, cp=2, sequence_parallel=True),
}  # fmt: skip


def on_rank(layout):
    """Largest difference of a log-prob between packs and single rollouts, stock schedule."""
    runtime.initialize(layout)
    spec = resolve("tiny-qwen3", num_layers=2).with_vocab(VOCAB)
    chunks = build_model(spec, layout=layout, dtype="float64")
    groups = list(generate(2, 12, 9, 3, uneven=True, vocab_size=VOCAB))
    items = align.on_this_cp_rank(align.microbatches(groups, 0, layout.alignment))
    packs = packing.microbatches(items, Baseline("packed", 64), cp_size=layout.cp)
    assert 1 < len(packs) < len(items)
    found = [passes.logprobs(get_forward_backward_func(), chunks, some) for some in (items, packs)]
    runtime.shutdown()
    single, packed = map(np.concatenate, found)
    return float(np.abs(single - packed).max())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_packed_rollout_has_the_log_probs_it_has_alone(name):
    layout = LAYOUTS[name]
    limit = tolerance(torch.float64, 64)
    assert max(run_ranks(layout.world_size, on_rank, layout)) <= limit


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


def test_what_takes_no_packs_is_refused_by_name():
    balance = "--set moe_router_load_balancing_type=seq_aux_loss --set moe_aux_loss_coeff=0.01"
    options = f"--groups 1 --max-tokens 64 --model tiny-moe {balance}".split()
    done = forked("align", "--rollouts", BUNDLED, *options)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "--baseline packed: seq_aux_loss" in line and "use --baseline rollout" in line
