"""Ranks that decide together have measured together."""

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import UserError
from megatron_prefix.features.measure import cost_meter
from megatron_prefix.features.measure.cost_file import read_costs
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl import packing
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.run.read.suspend import Capture
from tests.harness import steps
from tests.harness.ranks import run_ranks

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


def run(schedule, chunks, data):
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
        run(schedule, chunks, data)
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
    run(schedule, chunks, items(4, 0))
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
            run(PrefixSchedule(config), model_of(Layout(pp=2)), items(4, 0))
        runtime.shutdown()
        return str(caught.value)

    first, second = run_ranks(2, on_rank)
    assert first == second


# The prefilter, and ranks that share experts ------------------------------------------------------


@pytest.mark.parametrize(("layout", "with_prompt"), [
    (EP2, (False, False)), (Layout(pp=2, dp=2, ep=2), (True, False)),
], ids=str)  # fmt: skip
def test_no_tree_is_built_only_where_no_rank_shares(layout, with_prompt):
    def on_rank():
        runtime.initialize(layout)
        from megatron_prefix.run.rank import default_groups

        group = default_groups().dp_cp.rank()
        # A limit that no prediction reaches, and the prefilter's bound does.
        config = PrefixConfig(mode="auto", min_gain=0, kernel="math", min_speedup=1.3)
        schedule = PrefixSchedule(config)
        run(schedule, model_of(layout, "tiny-moe"), items(4, group, with_prompt[group]))
        report = schedule.report
        dist.barrier()
        runtime.shutdown()
        return len(report.forest.segments), report.decision.share, report.decision.reason

    found = run_ranks(layout.world_size, on_rank)
    assert all(bool(segments) == any(with_prompt) for segments, *_ in found)
    assert len({(share, reason) for _, share, reason in found}) == 1
