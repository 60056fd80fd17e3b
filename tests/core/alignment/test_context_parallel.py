"""Context parallelism on real ranks: against the stock schedule and against one rank.

The stock schedule's attention under context parallelism is here that of lab/models/local.py, over
gathered keys; so that this does not go in a circle, both are also held against one rank's.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli.main import main
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.plans.forest import max_depth, trees
from megatron_prefix.lab.rl import loss, passes
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.rl.batches import on_cp_rank
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import Pairs, TreeOptions, build, cp_layout
from tests.harness import steps
from tests.harness.context_parallel import DATA, VOCAB, spec
from tests.harness.data import BUNDLED
from tests.harness.predicted import predicted_bytes
from tests.harness.ranks import run_ranks
from tests.harness.rows import EVERYTHING, rows
from tests.harness.steps import Contract
from tests.harness.stock_once import stock_once

pytestmark = pytest.mark.turns

LAYOUTS = {
    "cp2": Layout(cp=2),
    "cp4": Layout(cp=4),
    "tp2 cp2": Layout(tp=2, cp=2, sequence_parallel=True),
    "pp2 cp2": Layout(pp=2, cp=2),
    "dp2 cp2": Layout(cp=2, dp=2),
}
# data, settings
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "none": [
        ("flat", {"segment_tokens": 48}),
        ("long prompt", {"chunk_tokens": 16}),
        ("long prompt", {"chunk_tokens": 16, "cp_reduce": "wave"}),
        ("tree", {"memory": "recompute", "cp_reduce": "wave"}),
        ("tree", {"memory": "recompute", "cp_reduce": "segment"}),
    ],
    "full": [
        ("flat", {"chunk_tokens": 16, "cp_reduce": "wave"}),
        ("tree", {"cp_reduce": "segment", "segment_tokens": 48}),
    ],
}

MEMORY = [
    ("tree", {"memory": "offload"}),
    ("tree", {"memory": "auto", "memory_budget_gb": 1e-4, "chunk_tokens": 16}),
]
"""In two layouts: what leaves the device does not depend on the others' groups."""


def cases(layout: Layout, recompute: str) -> list[tuple[str, dict[str, Any]]]:
    """What one set of ranks compares; without products all settings in one layout alone, and some
    with each way to reduce in the others."""
    if layout != LAYOUTS["cp2"] and EVERYTHING not in os.environ:
        return CASES[recompute][::2]
    alone = layout in (LAYOUTS["cp2"], LAYOUTS["pp2 cp2"])
    return CASES[recompute] + (MEMORY if alone and recompute == "none" else [])


def verdicts(layout: Layout, recompute: str, model: str, some: Any) -> list[align.Alignment]:
    """One rank's part of some cases."""
    runtime.initialize(layout)
    chunks = build_model(spec(model), layout=layout, dtype="float64", recompute=recompute)
    found = []
    for name, options in some:
        mine = DATA[name][align.data_rank() :: layout.dp]
        config = PrefixConfig(min_gain=0, **options)
        verdict = align.align(chunks, mine, config, multiple=layout.alignment)
        found.append(align.over_ranks(verdict))
    return found


def check(layout: Layout, recompute: str, some: Any, model: str = "tiny-llama") -> None:
    results = run_ranks(layout.world_size, stock_once()(verdicts), layout, recompute, model, some)
    for found in results:
        for (name, options), verdict in zip(some, found, strict=True):
            assert verdict.passed, (name, options, verdict.failures)
            assert verdict.executed_tokens < 0.8 * verdict.raw_tokens
            assert verdict.compared_with == align.GATHERED


ROWS = [
    *((layout, "none") for layout in LAYOUTS),
    # Megatron's recomputation asks for no data-parallel rank, nor how many share a sequence.
    *((layout, "full") for layout in ("cp2", "tp2 cp2", "pp2 cp2")),
]


@pytest.mark.parametrize(
    ("layout", "recompute"),
    rows(ROWS, [("dp2 cp2", "none"), ("tp2 cp2", "full"), ("pp2 cp2", "full")]),
)
def test_as_the_stock_schedule_in_the_same_layout(layout: str, recompute: str) -> None:
    check(LAYOUTS[layout], recompute, cases(LAYOUTS[layout], recompute))


ROUTED = {"gathered by wave": CASES["none"][2:4], "by segment": CASES["none"][4:]}
ROUTED["all"] = CASES["none"][:2]


@pytest.mark.parametrize("name", rows(ROUTED, ["all"]))
def test_routers_see_the_rows_of_all_ranks(name: str) -> None:
    check(Layout(cp=2, ep=2), "none", ROUTED[name], "tiny-moe")


def test_the_data_has_what_it_is_for() -> None:
    """Else an equal result proves nothing."""
    forests = {}
    for name, some in DATA.items():
        rollouts, numbers = [], []
        for number, group in enumerate(some):
            for item in align.microbatches([group], 7, 4):
                rollouts += steps.pairs_of(item)
                numbers.append(number)
        forests[name] = build(rollouts, numbers, TreeOptions(4, min_gain=0))
        middle = [r.trained[cp_layout.rank_positions(len(r), 1, 2)].any() for r in rollouts]
        assert any(middle) == (name != "long prompt")
        together = [len({*numbers}) for numbers in trees(forests[name].segments)]
        assert max(together) == 2, "no segment has spans of both trees"
    for forest in forests.values():
        assert any(len({span.padded for span in s.spans}) > 1 for s in forest.segments), "uneven"
    assert any(s.inner and s.scored for s in forests["tree"].segments)
    assert max_depth(forests["tree"]) > max_depth(forests["flat"]) == 2


# Against one rank ---------------------------------------------------------------------------------


def traces(layout: Layout, whole: Layout) -> tuple[tuple[int, int], list[align.Trace]]:
    """A rank's place but for context parallelism, and what both schedules computed there."""
    runtime.initialize(layout)
    overrides = {"calculate_per_token_loss": True}
    model = spec("tiny-qwen3")
    chunks = build_model(model, layout=layout, dtype="float64", config_overrides=overrides)
    items = align.microbatches(DATA["tree"], 7, whole.alignment)
    items = align.on_this_cp_rank(items)
    schedules = [get_forward_backward_func(), PrefixSchedule(PrefixConfig(min_gain=0))]
    found = [align.run_step(schedule, chunks, items) for schedule in schedules]
    place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return place, found


@pytest.mark.parametrize("name", rows(["cp2", "cp4", "tp2 cp2", "pp2 cp2"], ["cp2", "pp2 cp2"]))
def test_as_one_rank_in_the_place_of_its_group(name: str) -> None:
    """With a mean over tokens the layout does not matter; both schedules, gradients and steps."""
    layout = LAYOUTS[name]
    single = Layout(tp=layout.tp, pp=layout.pp, sequence_parallel=layout.sequence_parallel)
    expected = {
        place: stock for place, (stock, _) in run_ranks(single.world_size, traces, single, layout)
    }
    num_tokens = sum(len(r) for group in DATA["tree"] for r in group.rollouts)
    for place, found in run_ranks(layout.world_size, traces, layout, layout):
        for trace in found:
            for parameter, wanted in expected[place].gradients.items():
                what = f"gradient of {parameter}"
                assert_close(trace.gradients[parameter], wanted, num_tokens, what=what)


# Which ranks decide together ----------------------------------------------------------------------


def one_shares() -> bool:
    """Whether this rank's replica shared in a pass without gradients, where the other cannot."""
    layout = Layout(dp=2, cp=2)
    runtime.initialize(layout)
    model = resolve(
        "tiny-moe",
        num_layers=2,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1.0,
    ).with_vocab(VOCAB)
    chunks = build_model(model, layout=layout, dtype="float64")
    shape = ((64, 8, 8), (8, 64, 1))[parallel_state.get_data_parallel_rank()]
    groups = list(generate(2, *shape, vocab_size=VOCAB, uneven=True))
    items = align.on_this_cp_rank(align.microbatches(groups, 7, layout.alignment))
    schedule = PrefixSchedule(PrefixConfig(min_gain=0, mode="auto"))
    passes.logprobs(schedule, chunks, items)
    assert schedule.report is not None
    return schedule.report.decision.share


def test_a_replica_that_shares_waits_for_no_other() -> None:
    assert run_ranks(4, one_shares) == [True, True, False, False]


class Decided(Exception):
    """Ends a step."""


def decisions(budgets: list[float]) -> list[list[Any]]:
    """For each budget of memory what all ranks decide, which share experts and have other trees."""
    layout = Layout(dp=2, cp=2, ep=4)
    runtime.initialize(layout)
    model = resolve("tiny-moe", num_layers=2).with_vocab(VOCAB)
    chunks = build_model(model, layout=layout, dtype="float32")
    shape = ((256, 128, 8), (128, 32, 8))[parallel_state.get_data_parallel_rank()]
    groups = list(generate(1, *shape, vocab_size=VOCAB, uneven=True))
    items = align.on_this_cp_rank(align.microbatches(groups, 7, layout.alignment))
    found: list[list[Any]] = []
    settle = MemoryControl.settle

    def heard(control: Any, plan: Any, *more: Any) -> Any:
        found.append([None] * 4)
        settle(control, plan, *more)
        torch.distributed.all_gather_object(found[-1], (control.gathers, plan.policies))
        raise Decided

    MemoryControl.settle = heard  # type: ignore[method-assign]
    for budget in budgets:
        config = PrefixConfig(
            min_gain=0, chunk_tokens=64, segment_tokens=256, memory="auto", memory_budget_gb=budget
        )
        with contextlib.suppress(Decided), predicted_bytes():
            align.run_step(PrefixSchedule(config), chunks, items, optimize=False)
    return found


def test_ranks_that_share_experts_decide_alike() -> None:
    """Else one sends tokens to experts more often than another, which never ends."""
    budgets = np.geomspace(1e-3, 5e-2, 12).tolist()
    found = run_ranks(4, decisions, budgets)[0]
    assert len(found) == len(budgets)
    assert all(len({*one}) == 1 for one in found)
    assert len({one[0][0] for one in found}) == 2, "there is nothing to decide"


# Other losses -------------------------------------------------------------------------------------

CONTRACTS = (
    Contract(triple=False, scale=8.0),
    Contract(logits=True, per_token=True),
    Contract(sequence_level=True),
)


def samples() -> list[steps.Microbatch]:
    """Microbatches of one and of two samples, each 24 positions or shorter and padded."""
    draw = np.random.default_rng(3)
    prompt = draw.integers(0, VOCAB, 13)
    items: list[steps.Microbatch] = []
    for lengths in ((24,), (24, 20), (17, 24)):
        rollouts = []
        for length in lengths:
            tokens = np.concatenate([prompt, draw.integers(0, VOCAB, length + 1 - len(prompt))])
            trained = np.arange(length) >= len(prompt) - 1
            rollouts.append(Pairs(tokens[:-1], tokens[1:], trained))
        items.append(steps.microbatch(rollouts, "g", len(items), VOCAB))
    return items


def differences() -> list[list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """Per contract every gradient of the stock and of the prefix schedule, and every log."""
    layout = Layout(cp=2)
    runtime.initialize(layout)
    (model,) = build_model(spec(), layout=layout, dtype="float64")
    rank = parallel_state.get_context_parallel_rank()
    items = [on_cp_rank(item, rank, 2) for item in samples()]
    sliced = get_batch_on_this_cp_rank(
        {k: v for k, v in samples()[1].items() if k in items[1] and isinstance(v, torch.Tensor)}
    )
    assert all(torch.equal(items[1][name], value) for name, value in sliced.items())
    found = []
    for contract in CONTRACTS:
        contract.configure(model)
        results = []
        for schedule in (
            get_forward_backward_func(),
            PrefixSchedule(PrefixConfig(min_gain=0)),
        ):
            steps.zero_gradients(model)
            logs = steps.call(schedule, contract.step, model, items)
            results.append((steps.gradients(model), logs))
        (expected, stock_logs), (ours, logs) = results
        pairs = [(name, ours[name], gradient) for name, gradient in expected.items()]
        for mine, theirs in zip(logs, stock_logs, strict=True):
            pairs.append(("loss", mine["loss"].view(1), theirs["loss"].view(1)))
        found.append(pairs)
    return found


def test_losses_and_microbatches_of_other_trainers() -> None:
    for found in run_ranks(2, differences):
        for contract, pairs in zip(CONTRACTS, found, strict=True):
            for name, ours, expected in pairs:
                assert_close(ours, expected, 3 * 24, what=f"{name}, {contract}")


# The command --------------------------------------------------------------------------------------


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--groups 1 --max-tokens 64 --cp 2 --cp-reduce segment --set num_layers=1 --json"
    code = main(["align", "--rollouts", str(BUNDLED), *arguments.split()])
    result = json.loads(capsys.readouterr().out)
    assert code == 0 and result["passed"]
    assert result["baseline"] == "packed" and result["compared_with"] == align.GATHERED


def test_a_sidecar_on_the_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--groups 1 --max-tokens 64 --cp 2 --cache-host-layers 1 --set num_layers=1"
    assert main(["align", "--rollouts", str(BUNDLED), *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "cache_host_layers is for whole sequences" in captured.err


def joined(reduce: str) -> tuple[list[int], float, float]:
    """One rank of two: which segments are joined, and bytes of the sidecar, predicted and held."""
    layout = Layout(cp=2)
    runtime.initialize(layout)
    chunks = build_model(spec(), layout=layout, dtype="float64")
    config = PrefixConfig(kernel="math", min_gain=1, cp_reduce=reduce)  # type: ignore[arg-type]
    baseline = Baseline("packed", 200)
    mine, least = align.of_this_rank(spec(), layout, DATA["tree"], config, baseline, 0)
    items = align.made(mine, baseline, layout.alignment, least, 0)
    schedule = PrefixSchedule(config, Callbacks(loss.trained))
    passes.run(schedule, loss.forward_step(loss.GrpoConfig()), chunks, items)
    report: Any = schedule.report
    runtime.shutdown()
    found = [segment.joined for segment in report.forest.segments]
    return found, report.memory.cache_peak, report.cache_bytes


@pytest.mark.parametrize("reduce", ["wave", "segment"])
def test_what_joined_segments_keep_is_predicted(reduce: str) -> None:
    for found, predicted, held in run_ranks(2, joined, reduce):
        assert found == [0]
        assert predicted == pytest.approx(held, rel=1e-9)
