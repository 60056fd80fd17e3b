"""Ranks that share experts, with rollouts of their own number and shape, or with none at all, which
Megatron's own schedule cannot run (the reference is its step on one rank with everything); and
prompts whose rollouts are on several data-parallel ranks."""

import itertools
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import UserError
from megatron_prefix.lab import numerics, runtime
from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.data.shorten import shorten
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.models.weights import global_parameters
from megatron_prefix.lab.numerics import tolerance
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

EP2 = Layout(dp=2, ep=2)
PP2_EP2 = Layout(pp=2, dp=2, ep=2)
CHUNKED = PrefixConfig(min_gain=0, chunk_tokens=8, segment_tokens=24)
PACKED = PrefixConfig(min_gain=0)
CONTRACT = steps.Contract(per_token=True)


@dataclass(frozen=True)
class Case:
    """A layout, and the sizes of each data-parallel rank's groups."""

    groups: tuple[tuple[int, ...], ...]
    layout: Layout = EP2
    prefix: PrefixConfig = PrefixConfig(min_gain=0, segment_tokens=24)  # noqa: RUF009  # frozen
    recompute: str = "none"
    all_gather: bool = False  # of tokens: then all ranks need equally many


CASES = {
    "the first rank without any, PP2": Case(((), (3, 2)), PP2_EP2, CHUNKED),
    "all-gather, recomputed, joined": Case(
        ((3, 2), (1,)), EP2, PrefixConfig(min_gain=1, memory="recompute"), all_gather=True
    ),
    "several trees a segment, VPP2": Case(((2, 2, 2), (3, 2)), replace(PP2_EP2, vpp=2), PACKED),
}


def items(sizes, seed):
    """One rank's microbatches: groups of uneven rollouts, some with a turn that two share."""
    draw, found = np.random.default_rng(seed), []
    for group, size in enumerate(sizes):
        prompt, turn = draw.integers(0, 60, 21), draw.integers(0, 60, 9)
        for member in range(size):
            start = np.r_[prompt, turn] if member < 2 else prompt
            uid = 100 * seed + len(found)
            found += steps.answers(draw, [start], 5 + 3 * member, 20, group, uid)
    return found


def gradients(schedule, layout, data, case):
    """This rank's reduced gradients after a step, by their name in the whole model."""
    layers, recompute = max(2, case.layout.pp * case.layout.vpp), case.recompute
    runtime.initialize(layout)
    from megatron.core import parallel_state

    spec = resolve("tiny-moe", num_layers=layers, moe_aux_loss_coeff=1.0, moe_z_loss_coeff=0.5)
    options: dict[str, Any] = {"calculate_per_token_loss": True}
    if case.all_gather and layout.ep > 1:
        options |= {"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False}
    chunks = build_model(
        spec.with_vocab(64), layout=layout, dtype="float64", recompute=recompute,
        config_overrides=options,
    )  # fmt: skip
    mine = data[parallel_state.get_data_parallel_rank()]
    steps.call(schedule, CONTRACT.step, chunks, mine)
    pairs = [pair for chunk in chunks for pair in global_parameters(unwrap(chunk))]
    return {name: parameter.main_grad.detach().clone() for name, parameter in pairs}


def worst(case):
    """Largest relative difference of a gradient from the reference, in units of the tolerance."""
    data = [items(sizes, seed) for seed, sizes in enumerate(case.groups)]
    every = [item for mine in data for item in mine]
    stock = PrefixSchedule(PrefixConfig(mode="off"))
    (expected,) = run_ranks(1, lambda: gradients(stock, Layout(), [every], case))
    ours, world = PrefixSchedule(case.prefix), case.layout.world_size
    ranks = run_ranks(world, lambda: gradients(ours, case.layout, data, case))
    assert {name for rank in ranks for name in rank} == set(expected)
    limit = tolerance(torch.float64, sum(item["tokens"].numel() for item in every))
    return max(
        float((found - expected[name]).abs().max() / expected[name].abs().max()) / limit
        for rank in ranks
        for name, found in rank.items()
    )


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_rank_with_everything(name):
    assert worst(CASES[name]) <= 1.0


def test_the_stock_schedule_with_unequal_numbers_is_refused():
    data = [items(sizes, seed) for seed, sizes in enumerate(((4,), (3,)))]

    def on_rank():
        rank = runtime.initialize(EP2).rank
        spec = resolve("tiny-moe", num_layers=2).with_vocab(64)
        (model,) = build_model(spec, layout=EP2, dtype="float64")
        schedule = PrefixSchedule(replace(CHUNKED, mode="auto", min_speedup=100.0))
        with pytest.raises(UserError, match="different plans, of 4, 3 actions"):
            steps.call(schedule, CONTRACT.step, model, data[rank])

    run_ranks(2, on_rank)


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
