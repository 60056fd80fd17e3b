"""Plans from files: what fits a step runs, anything else is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.plan_file import PlanFile, read_plan
from megatron_prefix.features.plan_files.table import to_csv
from megatron_prefix.lab.plans.forest import forest_of
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import best_plan, loss_ready_after, make_plan
from megatron_prefix.plan.step_planner import StepPlanner
from megatron_prefix.tree import Forest, TreeOptions, build
from tests.harness.trees import cells, flat_rollouts, with_programs

COST = CostModel.of_flops(linear=1e6, head=0.0, attention=10.0, action_tokens=4.0)


def forest(prefix=8, suffix=4, num=3, num_groups=2, **options) -> Forest:
    rollouts, groups = flat_rollouts(prefix, suffix, num, num_groups)
    return build(
        rollouts, groups, TreeOptions(**{"min_gain": 0, "segment_tokens": suffix, **options})
    )


def saved(folder: Path, plan: Plan) -> str:
    path = folder / "plan.csv"
    path.write_text(to_csv(plan), encoding="utf-8")
    return str(path)


def each(num: int) -> list[int]:
    return list(range(num))


def refused(folder: Path, plan: Plan, step: Forest, ranks=2, chunks=1, microbatch_of=None) -> str:
    """The one line that refuses a plan for a step."""
    path = saved(folder, plan)
    with pytest.raises(UserError) as caught:
        PlanFile(path).fitting(step, ranks, chunks, microbatch_of or each(len(step.num_positions)))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (3, 2)])
def test_a_plan_of_the_step_is_run_as_it_is(tmp_path, ranks, chunks) -> None:
    step = forest()
    plan = make_plan(step, ranks, num_chunks=chunks, run_ahead=1)
    assert plan != best_plan(step, ranks, num_chunks=chunks) or ranks == 1
    file = PlanFile(saved(tmp_path, plan))
    for _ in range(2):
        assert file.fitting(step, ranks, chunks, each(6)) == plan
    planner = StepPlanner(PrefixConfig(plan_file=file.path), COST, 1, ranks, chunks, None)
    assert planner.plan(joint_forest([step], [each(6)])) == plan


def test_another_pipeline_is_refused(tmp_path) -> None:
    step = forest()
    plan = make_plan(step, 2, num_chunks=2)
    assert refused(tmp_path, plan, step, 2, 1).startswith(
        "a plan of 2 ranks with 2 model chunks each, and the pipeline has 2 with 1; change"
    )
    assert "and the pipeline has 4 with 2" in refused(tmp_path, plan, step, 4, 2)


def test_other_segments_are_refused_by_the_first(tmp_path) -> None:
    step = forest()
    plan = make_plan(step, 2)
    assert refused(tmp_path, plan, forest(suffix=5)).startswith(
        "segment 1 is 1,wave+scored,8+4/4:0<0.0, in this step it is 1,wave+scored,8+5/5:0<0.0; plan"
    )
    assert refused(tmp_path, plan, forest(num_groups=1)).startswith(
        "segment 4 is 4,inner,0+8/8:3 4 5, in this step it is not there"
    )
    assert refused(tmp_path, plan, forest(num_groups=3)).startswith(
        "segment 8 is not there, in this step it is 8,inner,0+8/8:6 7 8"
    )
    scored = replace(step, segments=(step.segments[0]._replace(scored=True), *step.segments[1:]))
    assert "in this step it is 0,inner+scored" in refused(tmp_path, plan, scored)


def test_losses_that_come_too_late_are_refused(tmp_path) -> None:
    """Two rollouts a microbatch: the plan is one for each on its own."""
    step = forest()
    plan = make_plan(step, 2)
    assert refused(tmp_path, plan, step, microbatch_of=[0, 0, 1, 1, 2, 2]).startswith(
        "rank 1, place 2: B1"
    )
    PlanFile(saved(tmp_path, plan)).fitting(step, 2, 1, each(6))


def test_a_plan_that_cannot_run_is_refused_before_any_step(tmp_path) -> None:
    plan = make_plan(forest(), 2)
    programs = cells(plan)
    programs[1].remove("B2")
    with pytest.raises(UserError) as caught:
        PlanFile(saved(tmp_path, with_programs(plan, programs)))
    message = str(caught.value)
    assert "\n" not in message
    assert (
        "rank 1, place 6: B0 runs before the backward of its child 2; `megatron-prefix show`"
        in (message)
    )


def test_what_is_no_plan_is_refused(tmp_path) -> None:
    path = tmp_path / "p.csv"
    with pytest.raises(UserError, match=r"p\.csv: cannot be read \(No such file"):
        PlanFile(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"p\.csv: not a plan: it is not text"):
        PlanFile(str(path))
    text = to_csv(make_plan(forest(), 1))
    path.write_text(
        text.replace("1,wave+scored,retain,4,8+", "1,wave+scored,retain,4,7+"), encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"p\.csv: segment 1: a span starts at 7, not at 8"):
        PlanFile(str(path))


def test_a_plan_runs_with_the_policies_of_its_file(tmp_path) -> None:
    step = forest()
    joint = joint_forest([step], [each(6)])
    own = ("recompute", *["retain"] * 3, "offload", *["retain"] * 3)
    path = saved(tmp_path, replace(make_plan(step, 2), policies=own))

    def planned(memory: str) -> tuple[str, ...]:
        config = PrefixConfig(plan_file=path, memory=memory)
        return StepPlanner(config, COST, 1, 2, 1, None).plan(joint).policies

    assert planned("retain") == planned("auto") == own
    for memory in ("recompute", "offload"):
        with pytest.raises(UserError, match=f"plan.csv: .* memory '{memory}'; leave --memory out"):
            planned(memory)
    saved(tmp_path, make_plan(step, 2))
    assert planned("retain") == ()
    assert planned("offload") == ("offload", *["retain"] * 3) * 2


def test_the_forest_of_a_plan_is_the_step_except_trained(tmp_path) -> None:
    step = forest(chunk_tokens=3)
    plan = read_plan(saved(tmp_path, make_plan(step, 2)))
    found = forest_of(plan)
    assert (found.segments, found.num_positions) == (step.segments, step.num_positions)
    simulate(plan, ready_after=loss_ready_after(found))


# The planner of every step ------------------------------------------------------------------------


def test_steps_are_planned_as_the_user_set() -> None:
    rollouts, groups = flat_rollouts(1024, 256, 4, 2)
    microbatch_of = [0, 0, 1, 1, 2, 2, 3, 3]
    config = PrefixConfig(chunk_tokens=200, segment_tokens=256, run_ahead=1)
    planner = StepPlanner(config, COST, 8, 4, 2, None)
    _, step = planner.build(rollouts, microbatch_of)
    assert step == build(rollouts, groups, TreeOptions(8, 200, 256), microbatch_of)
    plan = planner.plan(joint_forest([step], [microbatch_of]))
    assert plan == best_plan(step, 4, num_chunks=2, microbatches=microbatch_of, run_ahead=1)
    assert (
        planner.plan(joint_forest([step], [microbatch_of])).programs is plan.programs
    )  # from memory
    assert planner.plan(joint_forest([step], [each(8)])) is not plan


def test_chunks_are_chosen_by_the_cost_of_the_model() -> None:
    """Where an action costs next to nothing there are many, where it costs a lot there are few."""
    rollouts, _ = flat_rollouts(8192, 512, 8, 2)
    config = PrefixConfig(chunk_tokens="auto", segment_tokens=512)
    num = {}
    for action_tokens in (1.0, 4000.0):
        cost = CostModel.of_flops(1e6, 0.0, 1.0, action_tokens)
        planner = StepPlanner(config, cost, 1, 4, 1, None)
        num[action_tokens] = len(planner.build(rollouts, each(16))[1].segments)
    assert num[1.0] > num[4000.0] >= 2 + 16
