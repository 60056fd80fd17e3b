"""Prompts whose rollouts are on several data-parallel ranks run once, with the stock schedule's
losses and gradients."""

import itertools
import json
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.lab import numerics, runtime
from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.data.shorten import shorten
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.refusals.table import ACROSS_UNREDUCED
from megatron_prefix.run.calls import Callbacks
from tests.harness import steps
from tests.harness.command_line import BUNDLED, forked, run
from tests.harness.data import REPOSITORY
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.trees import trie_size

SMALL = "--groups 2 --max-tokens 96 --set num_layers=2 --min-gain 8 --dtype float64 --json"


def test_nothing_runs_twice_if_nothing_is_given_up(capsys):
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


def test_what_cannot_cross_is_refused():
    plan = next((REPOSITORY / "schedules").glob("*.csv"))
    options = f"--dp 2 --deal random --across-ranks on --prefix-plan {plan}"
    done = forked("align", "--rollouts", BUNDLED, *SMALL.split(), *options.split())
    assert done.returncode == 2
    assert "across_ranks with a plan file" in done.stderr


CONFIG = PrefixConfig(min_gain=0, kernel="math", across_ranks="on")


def unwrapped(config, says):
    """A rank's step with a model in no wrapper: positions that crossed, whether its
    own gradients are the stock schedule's, and why nothing crossed. Their sums always are."""
    runtime.initialize(Layout(dp=2))
    items = [steps.group(seed, 2)[dist.get_rank()] for seed in range(3)]
    contract, found = steps.Contract(per_token=True), []
    ours = PrefixSchedule(config, says)
    for schedule in (stock_schedule(), ours):
        model = small_model(dtype=torch.float64, wrap_ddp=False)
        contract.configure(model)
        found.append(steps.run(schedule, contract.step, model, items).gradients)
    stock, gradients = found
    largest = {name: float((gradients[name] - one).abs().max()) for name, one in stock.items()}
    limit = numerics.tolerance(torch.float64, 1000, 64, 8)
    limit *= max(float(one.abs().max()) for one in stock.values())
    for gradient in itertools.chain(stock.values(), gradients.values()):
        dist.all_reduce(gradient)
    steps.assert_gradients(gradients, stock, 1000)
    report: Any = ours.report
    crossed = report.crossed.received_tokens if report.crossed else 0
    return crossed, max(largest.values()) <= limit, report.why_alone


def test_without_a_wrapper_prompts_cross_only_if_told():
    auto = replace(CONFIG, across_ranks="auto")
    for crossed, is_stocks, why in run_ranks(2, unwrapped, auto, Callbacks()):
        assert (crossed, is_stocks) == (0, True)
        assert why == f"{ACROSS_UNREDUCED.name} is not supported yet"
    ranks = run_ranks(2, unwrapped, CONFIG, Callbacks(sums_gradients=True))
    assert sum(crossed for crossed, *_ in ranks) > 0
    assert not any(is_stocks for _, is_stocks, _ in ranks)
