"""The naive schedule that others are compared with, and the picture of the comparison."""

import pytest

from benchmarks import pipeline_bubbles
from benchmarks.barriers import barrier_plan, simulate_with_barriers
from benchmarks.pipeline_picture import picture
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.planner import loss_ready_after
from megatron_prefix.tree import TreeOptions, build
from tests.harness.data import REPOSITORY
from tests.harness.trees import flat_rollouts


@pytest.mark.parametrize(("p", "r", "n", "stages", "bubble"), [
    (10240, 2048, 16, 4, 0.46), (10240, 2048, 8, 4, 0.58), (10240, 2048, 8, 8, 0.76),
    (8192, 1024, 16, 4, 0.53),
])  # fmt: skip
def test_bubbles_with_barriers(p, r, n, stages, bubble):
    forest = build(*flat_rollouts(p, r, n, 4), TreeOptions(segment_tokens=r))
    plan = barrier_plan(forest, stages)
    simulate(plan, ready_after=loss_ready_after(forest))
    assert round(simulate_with_barriers(plan).bubble_fraction, 2) == bubble


def test_the_picture_is_what_its_command_draws():
    found = (REPOSITORY / "docs" / "schedules.svg").read_text(encoding="utf-8")
    assert found == picture(), "python -m benchmarks.pipeline_picture docs/schedules.svg"


def test_the_table_of_the_results_is_what_its_command_prints(capsys):
    pipeline_bubbles.main()
    assert capsys.readouterr().out in (REPOSITORY / "docs/results.md").read_text(encoding="utf-8")
