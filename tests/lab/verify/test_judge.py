"""`align` on a schedule that does one thing wrong, whichever rank does it; and on packed
microbatches, whose rollouts are dealt to ranks without regard to their groups."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from benchmarks.false_alarms import WRONG, small_case
from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.data.shorten import shorten
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.rl import packing, passes
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from tests.harness.command_line import BUNDLED, forked
from tests.harness.one_rank import one_rank
from tests.harness.ranks import run_ranks
from tests.harness.trees import trie_size

VOCAB = 64


def groups(number=0):
    return list(generate(1, 12, 8, 3, tree="flat", vocab_size=VOCAB, seed=number))


def chunks_of(layout=None):
    spec = resolve("tiny-qwen3", num_layers=2).with_vocab(VOCAB)
    return build_model(spec, layout=layout, dtype="float64")


def tampered(wrong, *, forward_only=False):
    """The prefix schedule, and `wrong` done to model and logs after every such call."""

    class Tampered(align.PrefixSchedule):
        def __call__(self, **arguments):
            logs = super().__call__(**arguments)
            if arguments["forward_only"] == forward_only:
                wrong(unwrap(arguments["model"]), logs)
            return logs

    return Tampered


def parameter(model, name):
    return dict(model.named_parameters())[name]


def gradient(factor, name):
    return lambda model, logs: parameter(model, name).main_grad.mul_(factor)


@torch.no_grad()
def weight(model, logs):
    """The schedule writes where it must not; the step begins from other weights."""
    parameter(model, "decoder.final_layernorm.weight")[3] += 1e-2


def log(name, factor):
    """A loss is logged as its sum and the number of tokens: only the sum is changed."""
    return lambda model, logs: (logs[-1][name][:1] if name == "loss" else logs[-1][name]).mul_(
        factor
    )


CASES = {
    "a gradient": (gradient(WRONG, "decoder.layers.0.mlp.linear_fc1.weight"), "gradient of"),
    "a gradient that is no number": (
        gradient(math.nan, "decoder.layers.1.input_layernorm.weight"), "gradient of",
    ),
    "a loss": (log("loss", WRONG), "loss: "),
    "log-probs": (log("logprobs", WRONG), "log-prob: "),
    "a weight": (weight, "parameter "),
}  # fmt: skip
"""Of each kind one, which tests of lab/numerics/compare.py spoil in every other way."""


@pytest.fixture
def chunks():
    with one_rank():
        yield chunks_of()


def aligned(chunks):
    return align.align(chunks, groups(), PrefixConfig(min_gain=0, kernel="math"))


def test_a_right_schedule_passes(chunks):
    verdict = aligned(chunks)
    assert verdict.passed is True and verdict.executed_tokens < verdict.raw_tokens
    assert verdict.compared == {
        "losses": 3, "gradients": 18, "parameters": 18, "log-probs": 24,
        "log-probs without gradients": 24,
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_thing_wrong_is_seen(name, chunks, monkeypatch):
    wrong, failure = CASES[name]
    monkeypatch.setattr(align, "PrefixSchedule", tampered(wrong))
    verdict = aligned(chunks)
    assert verdict.passed is False
    assert any(line.startswith(failure) for line in verdict.failures), verdict.failures


def test_passes_without_gradients_are_compared(chunks, monkeypatch):
    wrong = tampered(log("logprobs", WRONG), forward_only=True)
    monkeypatch.setattr(align, "PrefixSchedule", wrong)
    verdict = aligned(chunks)
    assert verdict.passed is False
    assert [line.partition(":")[0] for line in verdict.failures] == ["log-prob without gradients"]


@pytest.mark.parametrize("what", ["logs", "log-probs"])
def test_where_neither_schedule_says_anything_nothing_is_aligned(what, chunks, monkeypatch):
    """Both are silent, so both agree."""
    run = passes.run

    def silent(*arguments, **options):
        return [] if (what == "logs") != bool(options) else run(*arguments, **options)

    monkeypatch.setattr(passes, "run", silent)
    monkeypatch.setattr(align, "with_old_logprobs", lambda items, values, seed: items)
    if what == "logs":  # nothing ran, so there are neither gradients nor losses
        assert aligned(chunks).passed is False
    else:
        verdict = align.compare.over_ranks([aligned(chunks)])
        assert verdict.failures == ("no log-probs without gradients were compared",)


def test_every_rank_is_heard():
    """Data parallelism reduces gradients before they are compared; this rank's are wrong after."""
    layout, wrong_rank = Layout(dp=2), 1

    def on_rank():
        runtime.initialize(layout)
        chunks = chunks_of(layout)
        config = PrefixConfig(min_gain=0, kernel="math")
        mine, right = groups(align.data_rank()), align.PrefixSchedule
        found = []
        for schedule in (right, tampered(CASES["a gradient"][0])):
            if align.data_rank() == wrong_rank:
                align.PrefixSchedule = schedule  # in this process only
            found.append(align.over_ranks(align.align(chunks, mine, config)))
        return found[0], found[1]

    for right, wrong in run_ranks(2, on_rank):
        assert right.passed is True and right.compared["losses"] == 6
        assert right.raw_tokens == 2 * 3 * 19 and right.executed_tokens < right.raw_tokens
        assert wrong.passed is False
        assert {line.partition(":")[0] for line in wrong.failures} == {f"rank {wrong_rank}"}


# What is right is aligned, a sample of `benchmarks/false_alarms.py` -------------------------------


# Of the first hundred cases, some of the 27 that were called different when the limit followed from
# the tokens alone and each gradient was judged by its own size.  In 28 a gradient vanishes.
SEEDS = (13, 28)


@pytest.mark.parametrize("seed", SEEDS)
def test_right_is_aligned_and_a_millionth_is_noticed(seed):
    with one_rank():
        compared = small_case(seed).run()
        assert compared.verdict.failures == ()
        assert compared.unnoticed(WRONG) == []


BASELINES = [
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


@pytest.mark.parametrize(("name", "layout"), BASELINES)
def test_a_packed_rollout_has_the_log_probs_it_has_alone(name, layout):
    limit = tolerance(torch.float64, 64)
    assert max(run_ranks(layout.world_size, on_rank, name, layout)) <= limit


def aligned_in_process(text):
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
    whole, small, single = map(aligned_in_process, ("", "--pack-tokens 300", "--baseline rollout"))
    assert [one["baseline"] for one in (whole, small, single)] == ["packed", "packed", "rollout"]
    assert [one["pack_tokens"] for one in (whole, small, single)] == [16384, 300, 0]
    assert whole["microbatches"] == 1 < small["microbatches"] < single["microbatches"]
    assert whole["executed_tokens"] == single["executed_tokens"] < whole["raw_tokens"]


@pytest.mark.parametrize("text", ["--pp 2 --vpp 2 --set num_layers=4", "--ep 2 --model tiny-moe"])
def test_ranks_that_must_have_as_many_microbatches_do(text):
    assert aligned_in_process(f"--pack-tokens 200 {text}")["microbatches"] % 2 == 0


def test_scattered_groups_share_what_their_ranks_have():
    """Positions of each rank's tries, up to the last loss of each rollout."""
    found = aligned_in_process("--max-tokens 64 --min-gain 0 --dp 2 --deal length")
    assert found["deal"] == "length"
    groups = [shorten(group, 64)[0] for group in itertools.islice(read_groups(BUNDLED), 2)]
    assert found["raw_tokens"] == sum(len(r) - 1 for group in groups for r in group.rollouts)
    spec, config = resolve("tiny-llama"), PrefixConfig(min_gain=0)
    ranks = deal(groups, spec, Layout(dp=2), config, "length", stock=False, seed=1234)
    pairs = [pairs_of_groups(rank, tails=False)[0] for rank in ranks]
    assert found["executed_tokens"] == sum(map(trie_size, pairs))
