"""Mode "auto" measures steps, learns from them, and keeps what it has learned."""

import math

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import UserError
from megatron_prefix.features.measure import cost_meter
from megatron_prefix.features.measure.around import Measure
from megatron_prefix.features.measure.cost_file import Measured, read_costs, write_costs
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl import packing
from megatron_prefix.lab.rl.report_numbers import stopwatch_of
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.plan.gate import decide
from megatron_prefix.run.read.suspend import Capture
from tests.harness import steps
from tests.harness.one_group import run, schedule_with
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("on_one_rank")


def around_of(schedule):
    (feature,) = [one for one in schedule.features if isinstance(one, Measure)]
    return feature


def meter_of(schedule):
    (meter,) = around_of(schedule).meters.values()
    return meter


def costs_of(schedule):
    (of_model,) = schedule.requests.costs.values()
    return of_model


def measured(path):
    """What the one meter that writes this file has measured."""
    (entry,) = read_costs(str(path)).values()
    return entry.times


def remember(path, *measured_steps):
    """The next schedule with this file begins with these steps, and with nothing else."""
    (key,) = read_costs(str(path))
    path.unlink()
    write_costs(str(path), key, Measured(cost_meter.Evidence(steps=measured_steps)))


def ran(schedule, model, num):
    """Per step whether it was shared and whether it was measured."""
    found = []
    for _ in range(num):
        run(schedule, model)
        found.append((schedule.report.decision.share, meter_of(schedule).due))
    return found


def test_the_first_steps_are_measured_and_one_in_fifty(monkeypatch, tmp_path):
    monkeypatch.setattr(cost_meter, "EVERY", 7)
    path = tmp_path / "costs.json"
    model = small_model()
    schedule = schedule_with(mode="auto", min_speedup=0.01, cost_file=str(path))
    found = ran(schedule, model, 1)
    guess = costs_of(schedule).times
    found += ran(schedule, model, 7)
    assert [due for _, due in found] == [False, True, True, True, True, False, True, False]
    assert all(share for share, _ in found)
    assert costs_of(schedule).times.prices != guess.prices
    report = schedule.report
    assert report is not None and stopwatch_of(report) is None and report.prediction is not None
    # Steps of one shape: the fit says what they took, whatever the machine.
    shared = [step for step in measured(path).steps if step.share]
    assert len(shared) == 5
    ratios = [step.seconds / report.prediction.prefix_seconds for step in shared]
    assert math.isclose(sorted(ratios)[2], 1.0, rel_tol=0.5)


def test_auto_learns_that_sharing_is_slow(tmp_path):
    """Steps that were measured to take a hundred times as long are not shared any more."""
    path = tmp_path / "costs.json"
    model = small_model()
    schedule = schedule_with(mode="auto", min_speedup=0.5, cost_file=str(path))
    assert ran(schedule, model, 3) == [(True, False), (True, True), (True, True)]
    predicted = schedule.report.prediction
    assert schedule.report.fallback_count == 0 and predicted is not None
    stock = cost_meter.StepTime(False, tuple(predicted.stock_features.tolist()), 1e-7)
    remember(path, *measured(path).steps, stock)
    schedule = schedule_with(mode="auto", min_speedup=0.5, cost_file=str(path))
    assert ran(schedule, model, 1) == [(False, False)]
    assert schedule.report.fallback_count == 1


@pytest.mark.parametrize(
    ("speedup", "turns"), [(1.0, True), (1.5, True), (1.7, False), (0.6, False)]
)
def test_a_close_prediction_times_the_other_schedule(speedup, turns):
    config = PrefixConfig(mode="auto")
    decision = decide(config, speedup)
    other = cost_meter.other_way(config, decision)
    assert (other.share != decision.share) == turns
    if turns:
        assert other.fallback == (not other.share)
        assert other.reason.endswith(f"times the {'prefix' if other.share else 'stock'} schedule")
    on = PrefixConfig(mode="on")
    assert cost_meter.other_way(on, decide(on, speedup)).share


def test_the_next_run_begins_with_what_was_measured(tmp_path):
    path = str(tmp_path / "costs.json")
    model = small_model()
    first = schedule_with(mode="auto", min_speedup=0.01, cost_file=path)
    ran(first, model, 3)
    second = schedule_with(mode="observe", cost_file=path)
    ran(second, model, 1)
    assert costs_of(second).times == costs_of(first).times
    wider = small_model(spec={"ffn_hidden_size": 256})
    other, without = schedule_with(mode="observe", cost_file=path), schedule_with(mode="observe")
    for schedule in (other, without):
        run(schedule, wider)
    assert costs_of(other).times == costs_of(without).times
    (key,) = read_costs(path)
    assert "2 layers" in key and "cpu" in key and "kernel math" in key


EP2 = Layout(dp=2, ep=2)


def items(num, seed, shared=True):
    """Rollouts of 24 positions, with a prompt of 16 or with nothing in common."""
    draw = np.random.default_rng(seed)
    prompt = draw.integers(0, 60, 16)
    own = [prompt if shared else np.r_[60 + seed, uid, prompt[2:]] for uid in range(num)]
    return steps.answers(draw, own, 9, 15)


def model_of(layout, name="tiny-llama"):
    spec = resolve(name, num_layers=2 * layout.pp).with_vocab(64)
    return build_model(spec, layout=layout, dtype="float64")


def run_twice(schedule, chunks, data):
    steps.run(schedule, steps.Contract().step, chunks, data)


def learned(layout, path, unequal=False):
    """A rank's times at first and after six steps, and which of these were shared."""
    rank = runtime.initialize(layout).rank
    config = PrefixConfig(
        mode="auto", min_gain=0, kernel="math", min_speedup=1.05 if unequal else 0.01,
        cost_file=path,
    )  # fmt: skip
    schedule, chunks, shares = PrefixSchedule(config), model_of(layout), []
    data = items(4, 0, shared=not (unequal and rank == 1))
    for item in data if unequal and rank == 1 else ():
        item["loss_mask"][:] = 1.0  # no output may be left out either
    for number in range(6):
        run_twice(schedule, chunks, data)
        shares.append(schedule.report.decision.share)
        (costs,) = schedule.requests.costs.values()
        if number == 0:  # which is not measured
            guess = costs.times
    runtime.shutdown()
    return guess, costs.times, shares


LAYOUTS = [Layout(dp=2), Layout(pp=2, vpp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_know_the_same(layout, tmp_path):
    path = str(tmp_path / "costs.json")
    first, *others = run_ranks(layout.world_size, learned, layout, path)
    prior, times, shares = first
    assert times.prices != prior.prices and shares == [True] * 6
    assert all(found == first for found in others)
    (entry,) = read_costs(path).values()
    assert entry.times.times(prior) == times and entry.times.measured(True)
    # What the file has, the next job begins with; all ranks have what the first one read.
    again = run_ranks(layout.world_size, begun, layout, path)
    assert again == [times] * layout.world_size


def begun(layout, path):
    """The times that a job begins with; only the first rank sees the file."""
    rank = runtime.initialize(layout).rank
    config = PrefixConfig(mode="observe", kernel="math", cost_file=path + "x" * bool(rank))
    schedule, chunks = PrefixSchedule(config), model_of(layout)
    run_twice(schedule, chunks, items(4, 0))
    (costs,) = schedule.requests.costs.values()
    runtime.shutdown()
    return costs.times


def test_ranks_with_different_schedules_learn_together(tmp_path):
    """One of two data-parallel ranks has nothing to share, and hears what the other measured."""
    (_, times, shares), (_, other, never) = run_ranks(
        2, learned, Layout(dp=2), str(tmp_path / "costs.json"), True
    )
    assert times == other and never == [False] * 6 and shares[1]


TIMED = [Layout(tp=2, sequence_parallel=True), Layout(pp=2, vpp=2)]


@pytest.mark.parametrize("layout", TIMED, ids=str)
def test_all_ranks_time_stock_without_a_look(layout, tmp_path):
    """In the same steps, and each stage learns what the step has computed."""
    found = run_ranks(layout.world_size, timed_stock, layout, str(tmp_path / "costs.json"))
    (entry,) = read_costs(str(tmp_path / "costs.json")).values()
    assert {letters for letters, _ in found} == {"rSrS--rS"}
    expected = {features for _, features in found}
    assert {step.features for step in entry.times.measured(False)} <= expected


def timed_stock(layout, path):
    """Per step whether it was read and shared; and what reading says of the stock schedule."""
    runtime.initialize(layout)
    cost_meter.DOUBT, letters, before = 1e9, "", None
    config = PrefixConfig(mode="auto", min_gain=0, kernel="math", min_speedup=0.01, cost_file=path)
    schedule, chunks = PrefixSchedule(config), model_of(layout)
    groups = list(generate(2, 15, 34, 4, vocab_size=64, uneven=True))
    groups = groups[:: 1 + parallel_state.get_data_parallel_rank()]
    data = align.on_this_cp_rank(align.microbatches(groups, 7, layout.alignment))
    data = [packing.pack(data[:3], layout.cp), packing.pack(data[3:], layout.cp)]
    real = Capture.run

    def run_noted(self):
        nonlocal letters
        letters += "r"
        real(self)

    Capture.run = run_noted
    for _ in range(5):
        align.run_step(schedule, chunks, data, optimize=False)
        report = schedule.report
        letters += "-S"[report.decision.share]
        before = before or report
    runtime.shutdown()
    return letters, tuple(before.prediction.stock_features.tolist())


def test_a_bad_file_ends_all_ranks(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text("a letter", encoding="utf-8")

    def on_rank():
        rank = runtime.initialize(Layout(pp=2)).rank
        config = PrefixConfig(mode="auto", cost_file=str(path) + "x" * bool(rank))
        with pytest.raises(UserError, match="no file of measured costs") as caught:
            run_twice(PrefixSchedule(config), model_of(Layout(pp=2)), items(4, 0))
        runtime.shutdown()
        return str(caught.value)

    first, second = run_ranks(2, on_rank)
    assert first == second


# The prefilter, and ranks that share experts ------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "with_prompt"),
    [(EP2, (False, False)), (Layout(pp=2, dp=2, ep=2), (True, False))],
    ids=str,
)
def test_no_tree_is_built_only_where_no_rank_shares(layout, with_prompt):
    def on_rank():
        runtime.initialize(layout)
        from megatron_prefix.run.rank import default_groups

        group = default_groups().dp_cp.rank()
        # A limit that no prediction reaches, and the prefilter's bound does.
        config = PrefixConfig(mode="auto", min_gain=0, kernel="math", min_speedup=1.3)
        schedule = PrefixSchedule(config)
        run_twice(schedule, model_of(layout, "tiny-moe"), items(4, group, with_prompt[group]))
        report = schedule.report
        dist.barrier()
        runtime.shutdown()
        return len(report.forest.segments), report.decision.share, report.decision.reason

    found = run_ranks(layout.world_size, on_rank)
    assert all(bool(segments) == any(with_prompt) for segments, *_ in found)
    assert len({(share, reason) for _, share, reason in found}) == 1
