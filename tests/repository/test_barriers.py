"""The naive schedule that others are compared with, and the picture of the comparison."""

import itertools

import pytest

from benchmarks import pipeline_bubbles
from benchmarks.barriers import barrier_plan, phase, simulate_with_barriers
from benchmarks.pipeline_picture import picture
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.planner import loss_ready_after
from megatron_prefix.tree import TreeOptions, build
from tests.harness.data import REPOSITORY
from tests.harness.trees import flat_rollouts


@pytest.mark.parametrize(
    ("p", "r", "n", "stages", "bubble"),
    [
        (10240, 2048, 16, 4, 0.46), (10240, 2048, 8, 4, 0.58), (10240, 2048, 8, 8, 0.76),
        (8192, 1024, 16, 4, 0.53),
    ],
)  # fmt: skip
def test_bubbles_with_barriers(p, r, n, stages, bubble):
    forest = build(*flat_rollouts(p, r, n, 4), TreeOptions(segment_tokens=r))
    plan = barrier_plan(forest, stages)
    simulate(plan, ready_after=loss_ready_after(forest))
    assert round(simulate_with_barriers(plan).bubble_fraction, 2) == bubble


def test_no_phase_begins_before_the_last_has_ended_everywhere():
    forest = build(*flat_rollouts(64, 16, 5, 3), TreeOptions(segment_tokens=16, chunk_tokens=32))
    plan = barrier_plan(forest, 3)
    timeline = simulate_with_barriers(plan)
    assert timeline.num_actions == 2 * 3 * len(forest.segments)
    phases = sorted({phase(plan, event.action) for event in timeline.events})
    assert len(phases) == 9
    spans = [
        [event for event in timeline.events if phase(plan, event.action) == one] for one in phases
    ]
    for one, other in itertools.pairwise(spans):
        assert max(event.end for event in one) <= min(event.start for event in other)
    assert timeline.makespan > simulate(plan).makespan


def test_the_picture_is_what_its_command_draws():
    found = (REPOSITORY / "docs" / "schedules.svg").read_text(encoding="utf-8")
    assert found == picture(), "python -m benchmarks.pipeline_picture docs/schedules.svg"


def test_the_table_of_the_results_is_what_its_command_prints(capsys):
    pipeline_bubbles.main()
    assert capsys.readouterr().out in (REPOSITORY / "docs/results.md").read_text(encoding="utf-8")
