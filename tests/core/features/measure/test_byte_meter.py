"""What mode "auto" and memory "auto" learn of bytes, from counters in the place of a GPU's."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.device import memory
from megatron_prefix.features.measure.allocator import Peaks
from megatron_prefix.features.measure.byte_meter import CallBytes, StageCount, of_all_ranks
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.plan import prediction
from megatron_prefix.plan.memory import StageBytes
from megatron_prefix.run.costs import Costs
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.request import Request
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.run.execute.test_memory_limit import batches
from tests.harness import steps
from tests.harness.allocator import Allocator
from tests.harness.one_rank import one_rank, small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract

OPTIONS: dict[str, Any] = dict(segment_tokens=96, min_gain=0, min_speedup=0.01)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """No bytes are too few to count."""
    monkeypatch.setattr(prediction, "LEAST_OVER", 0.0)
    with one_rank():
        yield small_model("tiny-llama", vocab=128, spec={"num_layers": 3}, dtype=torch.float32)


class Step:
    """One step of a schedule: its decision, and the most bytes at once in it alone."""

    def __init__(self, schedule: Any, model: Any, items: list[Any], allocator: Allocator) -> None:
        before, allocator.highest = allocator.highest, allocator.used
        with allocator.running():
            steps.zero_gradients(model)
            steps.call(schedule, Contract().step, model, items)
        self.report = schedule.report
        self.limit = schedule.memory.limit
        self.share = schedule.report.decision.share
        self.policies = {*schedule.report.plan.policies}
        self.peak = allocator.highest - allocator.other
        allocator.highest = max(before, allocator.highest)


def schedule_of(mode: str = "auto", **options: Any) -> PrefixSchedule:
    config = PrefixConfig(mode=mode, **{**OPTIONS, **options})
    with mock.patch.object(memory, "may_count", return_value=True):
        return PrefixSchedule(config, looks_first=mode == "auto")


def run(model: Any, items: list[Any], number: int = 4, **options: Any) -> list[Step]:
    """The first steps of a schedule."""
    schedule, allocator = schedule_of(**options), Allocator(model)
    return [Step(schedule, model, items, allocator) for _ in range(number)]


@pytest.mark.parametrize("order", ["shuffled", "in groups"])
def test_auto_keeps_to_what_stock_has_taken(order: str, model: Any) -> None:
    """The first step is Megatron's; then none takes more, the first shared one included, and what
    is predicted of later ones is what they take."""
    watched, *shared = run(model, batches(order), 4)
    assert not watched.share and all(step.share for step in shared)
    weights = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    limit = 1.05 * (watched.peak + weights) - weights
    assert shared[0].peak <= limit
    for step in shared[1:]:
        assert step.limit == pytest.approx(limit, rel=0.01)
        assert step.peak <= 1.02 * limit
        assert step.report.memory.peak == pytest.approx(step.peak, rel=0.06)
    assert {"recompute", "recompute_act"}.isdisjoint(shared[-1].policies) == (order != "shuffled")


def test_mode_on_learns_from_a_lean_step(model: Any) -> None:
    """All inner segments run again in the first; what they keep is known all the same."""
    first, *later = run(model, batches("in groups"), 3, mode="on")
    assert first.policies == {"recompute", "retain"} and first.limit == float("inf")
    assert not first.report.memory.kept
    for step in later:
        assert step.policies == set() and step.peak > first.peak
        assert step.report.memory.peak == pytest.approx(step.peak, rel=0.04)


def test_a_first_step_has_no_longer_segment_than_microbatch(model: Any) -> None:
    """Microbatches are of 192 positions, and answers of six rollouts fill one."""
    first, second = run(model, batches("in groups", size=1), 2, mode="on", segment_tokens=2048)
    lengths = ([s.padded_length for s in step.report.plan.segments] for step in (first, second))
    short, long = map(max, lengths)
    assert short <= 192 < long


@pytest.mark.parametrize("memory", ["recompute_act", "offload"])
def test_policies_that_the_user_has_set_stay(memory: str, model: Any) -> None:
    for step in run(model, batches("in groups"), 1, mode="on", memory=memory):
        assert memory in {*step.policies, "retain"} and len(step.policies) <= 2


def test_what_a_policy_drops_is_known_to_be_kept_without_it(model: Any) -> None:
    numbers = []
    for policy in ("retain", "recompute", "recompute_act"):
        schedule, allocator = schedule_of("on", memory=policy), Allocator(model)
        Step(schedule, model, batches("in groups"), allocator)
        [costs] = schedule.requests.costs.values()
        numbers.append(costs.num_bytes[True][0])
    for other in numbers[1:]:
        assert other[:2] == pytest.approx(numbers[0][:2], rel=0.05)


def test_without_memory_to_spare_segments_run_again(model: Any) -> None:
    """A budget of 0.8 of what sharing wants is kept."""
    items = batches("in groups")
    wanted = max(step.peak for step in run(model, items, 3, mode="on"))
    budget = 0.8 * wanted / 2**30
    first, *later = run(model, items, 3, mode="on", memory_budget_gb=budget)
    assert {"recompute", "recompute_act", "offload"} & first.policies
    for step in later:
        assert {"recompute", "recompute_act", "offload"} & step.policies
        assert step.peak <= 1.02 * 0.8 * wanted


def test_what_the_trainer_holds_besides_changes_nothing(model: Any) -> None:
    """Before every step another amount, and much more than steps take."""
    items = batches("shuffled")
    alone = run(model, items, 3)
    schedule, allocator = schedule_of(), Allocator(model)
    for number, step in enumerate(alone):
        allocator.other = 1e9 * (1 + number % 2)
        beside = Step(schedule, model, items, allocator)
        assert (beside.share, beside.peak) == (step.share, step.peak)
        if number > 1:
            assert beside.limit == pytest.approx(step.limit, rel=0.02)


def test_where_others_had_the_maximum_moments_are_guessed_once(model: Any) -> None:
    """A second process, or another phase: the allocator's maximum moves in no step."""
    schedule, allocator = schedule_of(), Allocator(model)
    allocator.highest = 1e12
    with allocator.running():
        for number in range(3):
            steps.zero_gradients(model)
            steps.call(schedule, Contract().step, model, batches("in groups"))
            assert schedule.report is not None and schedule.report.decision.share == (number > 0)
    [costs] = schedule.requests.costs.values()
    stock, ours = costs.num_bytes[False][0], costs.num_bytes[True][0]
    assert stock.moment == pytest.approx(2 * stock.wave / 3, rel=0.01)
    assert ours.moment == stock.moment  # there is nothing better


def test_a_resume_begins_with_what_is_known(model: Any, tmp_path: Path) -> None:
    options = dict(mode="on", cost_file=str(tmp_path / "costs.json"))
    *_, last = run(model, batches("in groups"), 3, **options)
    [first] = run(model, batches("in groups"), 1, **options)
    assert first.policies == last.policies == set()
    assert first.limit == pytest.approx(last.limit, rel=0.01)


def hot(*factors: float) -> list[tuple[Any, Any, list[Any]]]:
    """A rank's part of steps in which the second rank's tokens take more, by so much."""
    runtime.initialize(Layout(dp=2, ep=2))
    parts = [_hot(factor) for factor in factors]
    runtime.shutdown()
    return parts


def _hot(factor: float) -> tuple[Any, Any, list[Any]]:
    prediction.LEAST_OVER = 0.0
    spec = {"num_layers": 2, "num_moe_experts": 4}
    model = small_model("tiny-moe", spec=spec, layout=Layout(dp=2, ep=2), dtype=torch.float32)
    schedule, allocator = schedule_of(kernel="math", across_ranks="off"), Allocator(model)
    allocator.hot = factor if dist.get_rank() else 1.0
    plans = []
    for _ in range(3):
        Step(schedule, model, batches("in groups"), allocator)
        report: Any = schedule.report
        plans.append((report.decision.share, report.plan.policies, schedule.memory.limit))
    [costs] = schedule.requests.costs.values()
    return costs.num_bytes, [share for share, *_ in plans], plans


def test_all_ranks_plan_by_the_one_that_has_most() -> None:
    ((even, *_), one), (_, other) = run_ranks(2, hot, 1.0, 1.5)
    assert one == other and True in one[1]
    for share in (False, True):
        for ours, alone in zip(one[0][share][0][:2], even[share][0][:2], strict=True):
            assert 1.3 * alone < ours < 1.6 * alone


# Numbers ------------------------------------------------------------------------------------------


def test_numbers_fit_what_was_counted() -> None:
    wanted = StageBytes(90.0, 110.0, 7.0, 500.0)
    rows = [
        (64.0, 0.0, 0.0, 0.0),
        (0.0, 32.0, 8.0, 2.0),
        (0.0, 48.0, 3.0, 1.0),
        (0.0, 9.0, 9.0, 4.0),
    ]
    sizes = [sum(a * b for a, b in zip(row, wanted[:4], strict=True)) for row in rows]
    found = StageCount.of_rows(rows, sizes).numbers()
    again = [sum(a * b for a, b in zip(row, found[:4], strict=True)) for row in rows]
    assert again == pytest.approx(sizes, rel=1e-3)
    assert (*found[:3], found.span) == pytest.approx((*wanted[:3], wanted.span), rel=0.06)


@pytest.mark.parametrize("kind", [0, 1])
def test_what_did_not_run_keeps_as_much(kind: int) -> None:
    row = tuple(float(10 * (place == kind)) for place in range(4))
    numbers = StageCount.of_rows([row], [50.0]).numbers()
    assert numbers == pytest.approx((5.0, 5.0, 0.0, 0.0, 0.0, 0.0))
    assert StageCount.of_rows([], []).numbers() == StageBytes()


def test_what_comes_in_one_proportion_is_the_positions() -> None:
    """So that Megatron's schedule, whose positions have no parents, is not taken for lighter."""
    rows = [(0.0, float(n), float(n), n / 8) for n in (8, 16, 24)]
    numbers = StageCount.of_rows(rows, [100 * row[1] for row in rows]).numbers()
    assert numbers.wave == pytest.approx(100, rel=0.01)


def test_padding_of_waves_is_not_counted_as_bytes_of_spans() -> None:
    """Of equal rollouts in waves: bytes follow spans exactly, and positions but for padding."""
    rows = [(0.0, 512.0 * num + 14, 512.0 * num, float(num)) for num in (7, 7, 7, 1)]
    numbers = StageCount.of_rows(rows, [1e6 * 512 * row[3] for row in rows]).numbers()
    assert numbers.wave + numbers.scored == pytest.approx(1e6, rel=0.05)


def test_what_a_backward_frees_besides_is_not_bytes_of_waves() -> None:
    """Gradients on their way to a prompt are freed in its backward (context parallelism)."""
    inner = [(2048.0, 0.0, 0.0, 0.0), (2048.0, 0.0, 0.0, 0.0)]
    waves = [(0.0, 514.0 * num, 512.0 * num, float(num)) for num in (7, 7, 7, 1)]
    sizes = [2e9, 2.7e9, *(1.4e6 * row[1] for row in waves)]
    numbers = StageCount.of_rows([*inner, *waves], sizes).numbers()
    assert numbers.wave + numbers.scored == pytest.approx(1.4e6, rel=0.01)
    assert 2e9 / 2048 < numbers.inner < 2.7e9 / 2048


def test_ranks_count_as_the_one_that_has_most() -> None:
    """One cannot tell a wave's positions from those with loss; another keeps a half more."""
    row = [(0.0, 10.0, 10.0, 0.0), (0.0, 30.0, 30.0, 0.0)]
    others = [(0.0, 10.0, 2.0, 0.0), (0.0, 30.0, 25.0, 0.0)]

    def count(rows: list[Any], more: float = 1.0) -> StageCount:
        return StageCount.of_rows(rows, [more * (4 * r[1] + 8 * r[2]) for r in rows])

    alone: list[Any] = [{False: {}, True: {0: count(rows)}} for rows in (row, others)]
    for order in itertools.permutations(alone):
        numbers = of_all_ranks(order)[True][0].numbers()
        assert (numbers.wave, numbers.scored) == pytest.approx((4, 8), rel=1e-3)
    hot: Any = {False: {0: count(row)}, True: {0: count(others, 1.5), 1: count(row)}}
    both = of_all_ranks([alone[1], hot])
    assert both[False].keys() == {0} and both[True].keys() == {0, 1}
    assert both[True][0].numbers()[1:3] == pytest.approx((6, 12), rel=1e-3)


def test_what_did_not_run_is_as_it_was_known() -> None:
    known = StageBytes(7.0, 9.0)
    wave = StageCount.of_rows([(0.0, 10.0, 0.0, 0.0)], [50.0])
    assert wave.numbers(known)[:2] == pytest.approx((7.0, 5.0))


@pytest.mark.parametrize("odd", ["no decoder", "no tensor"])
def test_a_model_that_is_odd_ends_no_step(odd: str, model: Any) -> None:
    """Mode auto watches it before it is refused."""
    other = torch.nn.Identity()
    if odd == "no tensor":
        other.decoder = torch.nn.Identity()
        other.register_forward_hook(lambda *_: other.decoder({"loss": 1}))
    rank: Any = replace(Rank.of([model]), language_models=[other])
    calls, allocator = CallBytes(rank), Allocator(model)
    with allocator.running(), calls.counting():
        other(torch.ones(2, 3))
    assert calls.stages(Peaks(0.0, 0.0, 0.0), Peaks(0.0, 0.0, 0.0), {}) == {}
    assert len(other._forward_hooks) == (odd == "no tensor") and not other._forward_pre_hooks


def test_passes_without_gradients_join_from_the_first(model: Any) -> None:
    options: Any = {}, None, None
    with Allocator(model).running():
        for forward_only in (True, False):
            rank = Rank.of([model], forward_only=forward_only)
            request = Request(options[0], rank, *options[1:], Costs(rank))
            assert request.may_join == forward_only


def test_nothing_of_a_step_stays_with_its_report(model: Any) -> None:
    """Reports outlive models."""
    for step in run(model, batches("in groups"), 2):
        assert not [name for name in step.report.features if name != "stopwatch"]
        gone = {type(one).__name__ for one in gc.get_objects()} & {"SegmentBytes", "CallBytes"}
        assert not gone


def test_on_the_cpu_nothing_is_counted(model: Any) -> None:
    schedule = schedule_of("on")
    steps.call(schedule, Contract().step, model, batches("in groups"))
    [costs] = schedule.requests.costs.values()
    assert not costs.counts and not costs.is_known
    assert schedule.report is not None and schedule.report.plan.policies == ()


@pytest.mark.parametrize(
    ("overheads", "wanted"), [((0.0, 1.3), 1.0), ((1.2, 1.2), 1.0), ((1.0, 1.5), 1.5)]
)
def test_what_ours_reserves_more_counts(
    overheads: tuple[float, float], wanted: float, model: Any
) -> None:
    costs = Costs(Rank.of([model]))
    costs.overheads = dict(zip((False, True), overheads, strict=True))
    assert costs.overhead == wanted
