"""The modes of the function that stands in for Megatron's, what it reports and offloads."""

import contextlib
import logging
from typing import Any
from unittest import mock

import pytest
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix import PrefixConfig, PrefixSchedule, get_forward_backward_func
from megatron_prefix.features.host.segment import OffloadedSegment
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.rl.step_parts import watching
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.install import installed
from megatron_prefix.plan.step_planner import StepPlanner
from tests.harness import one_group
from tests.harness.arenas import offloaders
from tests.harness.one_group import run, schedule_with
from tests.harness.one_rank import small_model
from tests.harness.predicted import predicted_bytes
from tests.harness.steps import assert_bitwise

pytestmark = pytest.mark.usefixtures("on_one_rank")


def test_mode_off_is_megatrons_schedule():
    def unasked(call):
        raise AssertionError("nobody may look at the calls")

    model, twin = small_model(), small_model()
    schedule = get_forward_backward_func(prefix_config=PrefixConfig(mode="off"), trained=unasked)
    assert_bitwise(run(schedule, model), run(stock_schedule(), twin))
    assert schedule.report is None and installed(model) is None


def test_mode_auto_falls_back_loudly(caplog):
    model, twin = small_model(), small_model()
    schedule = schedule_with(mode="auto", min_speedup=3.2)
    expected = run(stock_schedule(), twin)
    for count in (1, 2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert_bitwise(run(schedule, model), expected)
        report = schedule.report
        assert report is not None and report.fallback_count == count
        assert report.decision.share is False and report.decision.fallback is True
        reason = f"predicted speedup {report.decision.predicted_speedup:.2f} is below min_speedup"
        assert report.fallback_reason == report.decision.reason == f"{reason} 3.20"
        assert report.forest.executed_tokens == 33
        messages = [record.getMessage() for record in caplog.records]
        assert messages == [f"stock schedule for this step: {report.decision.reason}"]
    assert installed(model) is None


def test_a_step_without_sharing_gets_no_tree(caplog):
    """Its first positions tell; in the other modes everything is planned as ever."""
    model, twin = small_model(), small_model()
    auto, on = schedule_with(mode="auto"), schedule_with()
    alone = [one_group.items(num=1)[0] for _ in range(3)]
    for number, item in enumerate(alone):
        item["tokens"][:, 0] = number
        item["loss_mask"][:] = 1.0  # no output may be left out
        item["uid"] = number
    expected = run(stock_schedule(), twin, data=alone)
    with (
        caplog.at_level(logging.WARNING),
        mock.patch.object(StepPlanner, "build", side_effect=AssertionError("a tree is built")),
    ):
        assert_bitwise(run(auto, model, data=alone), expected)
        with pytest.raises(AssertionError, match="a tree is built"):
            run(on, model, data=alone)
    report = auto.report
    assert report is not None and report.decision.fallback and report.fallback_count == 1
    assert report.forest.segments == () and report.forest.raw_tokens == 3 * 17
    assert "share too few first positions" in report.decision.reason
    assert [report.decision.reason in record.getMessage() for record in caplog.records] == [True]


def test_a_budget_that_sharing_exceeds_is_kept_by_stock():
    """One that it keeps to is no reason, and without gradients little is kept."""
    model, twin = small_model(), small_model()
    expected = run(stock_schedule(), twin)
    rich = schedule_with(mode="auto", min_speedup=0.01, memory_budget_gb=1.0)
    with predicted_bytes():
        run(rich, model)
    assert rich.report is not None and rich.report.decision.share
    peak_gb = rich.report.memory.peak / 2**30
    less: dict[str, Any] = dict(memory_budget_gb=0.9 * peak_gb, memory="retain")
    poor = schedule_with(mode="auto", min_speedup=0.01, **less)
    with predicted_bytes():
        assert_bitwise(run(poor, model), expected)
    decision = poor.report.decision
    assert decision.fallback and "and memory_budget_gb is" in decision.reason
    run(poor, model, forward_only=True)
    assert poor.report.decision.share


def test_a_segment_is_loaded_in_the_backward_before_its_own(monkeypatch):
    """Not while other segments' forwards still want the memory."""
    early_in, running, prefetch = set(), [""], OffloadedSegment.prefetch

    def watch(action):
        running[0] = str(action)
        return contextlib.nullcontext()

    def recorded(self, *, early=False):
        before = offloading[0].counts.prefetched
        prefetch(self, early=early)
        if early and offloading[0].counts.prefetched > before:
            early_in.add(running[0])

    offloading = offloaders(monkeypatch)
    monkeypatch.setattr(OffloadedSegment, "prefetch", recorded)
    groups = list(generate(2, 60, 4, 3, vocab_size=64))  # prompts that pay for their action
    config = PrefixConfig(memory="offload", kernel="math", min_gain=3, segment_tokens=4, mode="on")
    schedule = PrefixSchedule(config)
    with predicted_bytes(), watching(schedule, watch):
        align.run_step(schedule, [small_model()], align.microbatches(groups, 0))
    program = [str(action) for action in schedule.report.plan.programs[0]]
    prompts = [f"B{n}" for n, s in enumerate(schedule.report.plan.segments) if s.inner]
    assert len(prompts) == 2
    assert early_in == {program[program.index(prompt) - 1] for prompt in prompts}
    assert all(action.startswith("B") for action in early_in)
    # Two prompts are on the host at once, one after the other or together: as the plan says.
    staged = schedule.report.memory.staged
    assert 0.9 <= offloading[0].counts.stored / len(prompts) / staged <= 1.1
