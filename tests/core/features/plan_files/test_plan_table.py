"""Actions and plans as text: what is written is read back, what is wrong is named."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.plan_file import PlanFile
from megatron_prefix.features.plan_files.table import from_csv, parse_action, to_csv
from megatron_prefix.lab.plans.messages import without_messages
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Transfer
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.error import PlanError
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import best_plan, make_plan
from megatron_prefix.plan.step_planner import StepPlanner
from megatron_prefix.tree import TreeOptions, build
from tests.harness.fuzzing import rounds
from tests.harness.trees import cells, flat_rollouts, rollout_sets, tree_options, with_programs


def small_plan():
    rollouts, groups = flat_rollouts(prefix=6, suffix=2, num=2, num_groups=1)
    return make_plan(build(rollouts, groups, TreeOptions(min_gain=0, chunk_tokens=3)), 2)


SMALL_CSV = """\
megatron_prefix plan,version,ranks,chunks
megatron_prefix plan,4,2,1
segment,kind,policy,trained,spans (start+length/padded:rollouts<parent segment.span)
0,inner,retain,0,0+3/3:0 1
1,inner,retain,0,3+3/3:0 1<0.0
2,wave+scored,retain,4,6+2/2:0<1.0,6+2/2:1<1.0
rank 0,F0,F1,F2,B2,B1,B0
rank 1,F0,F1,F2,B2,B1,B0
"""


@pytest.mark.parametrize("text", [
    *["", "F", "3", "f3", "F-1", "F3.", "F3.1.2", "W3", "F 3", "F3B3"],
    *["S3", "R3", "S3<1", "R3>1", "F3>1", "B3<1", "S3>", "S3>-1", "S3>1.1"],
])  # fmt: skip
def test_what_is_no_action_is_refused(text):
    with pytest.raises(UserError, match="is not an action"):
        parse_action(text)


def test_a_plan_as_csv():
    assert to_csv(small_plan()) == SMALL_CSV


@given(rollout_sets(), tree_options(), st.integers(1, 8))
@settings(max_examples=rounds(30, 500))
def test_a_plan_is_read_back(sets, options, num_ranks):
    plan = make_plan(build(*sets, options), num_ranks)
    assert from_csv(to_csv(plan)) == plan
    assert from_csv(to_csv(plan).replace("\n", "\r\n")) == plan


ACROSS_CSV = """\
megatron_prefix plan,version,ranks,chunks
megatron_prefix plan,5,1,1
segment,kind,policy,trained,ranks (<source or >peer:its spans),spans\
 (start+length/padded:rollouts<parent segment.span)
0,inner,retain,0,<2,0+3/3:0 1
1,inner,retain,0,>1:0;>2:0 1,3+3/3:0<0.0,3+3/3:1<0.0
2,wave+scored,retain,4,,6+2/2:0<1.0,6+2/2:1<1.1
rank 0,R0<2,F1,S1>1,S1>2,F2,B2,R1<1,R1<2,B1,S0>2
"""


def test_a_plan_whose_segments_cross_ranks_is_read_back():
    plan = from_csv(ACROSS_CSV)
    assert [segment.source for segment in plan.segments] == [2, -1, -1]
    assert plan.transfers == (Transfer(1, 1, (0,)), Transfer(1, 2, (0, 1)))
    assert to_csv(plan) == ACROSS_CSV
    simulate(without_messages(plan))
    assert str(without_messages(plan).programs[0][0]) == "F0"


@pytest.mark.parametrize("cell", ["S2>1", "R2<1", "S0>1", "S1>3", "R9<1"])
def test_a_message_that_no_segment_has_is_found(cell):
    plan = from_csv(ACROSS_CSV.replace(",F2,", f",{cell},F2,"))
    with pytest.raises(PlanError, match=f"rank 0, place 2: {cell} does not exist"):
        simulate(without_messages(plan))


@pytest.mark.parametrize("cell", ["2", "<", "<-1", ">1", ">1:", ">1:0;", ">1:0 ;>2:0", "<1;>2:0"])
def test_ranks_that_cannot_be_read(cell):
    with pytest.raises(UserError, match=r"p\.csv:4: "):
        from_csv(ACROSS_CSV.replace(",<2,", f",{cell},"), "p.csv")


@pytest.mark.parametrize(("old", "new", "message"), [
    (SMALL_CSV, "", "p.csv: not a plan"),
    ("segment,kind", "part,kind", "p.csv:3: not the columns of a plan"),
    ("plan,4,2,1", "plan,6,2,1", "p.csv:2: a plan of version 6, .* reads versions 4 and 5"),
    ("plan,4,2,1", "plan,5,2,1", "p.csv:3: not the columns of a plan"),
    ("plan,4,2,1", "plan,4,0,1", r"p.csv:2: ranks 0"),
    ("plan,4,2,1", "plan,4,x,1", "p.csv:2: .* whole numbers"),
    ("plan,4,2,1", f"plan,4,{10**300},1", "p.csv:2: .* whole numbers"),
    ("plan,4,2,1", "plan,4,9,1", "5 lines after the header, 9 ranks announced"),
    ("plan,4,2,1", "plan,4,2,999999999", "p.csv:2: 3 segments on 999999999 model chunks"),
    (",kind,policy,", ",kind,", "p.csv:3: not the columns of a plan"),
    ("\n1,inner", "\n2,inner", "p.csv:5: segment 2: number from 0"),
    ("1<0.0", "1<0", r"p.csv:5: '3\+3/3:0 1<0' is not a span: .* <segment.span of its parent"),
    ("1<0.0", f"1<{10**300}.0", r"p.csv:5: '3\+3/3:0 1<1000.*\.\.\.' is not a span"),
    ("inner,retain", "inner,forget", "p.csv:4: policy 'forget': inner can have retain or rec"),
    (
        "scored,retain",
        "scored,recompute",
        r"p.csv:6: policy 'recompute': wave\+scored can have",
    ),
    ("0+3/3:0 1", "0+3:0 1", r"p.csv:4: '0\+3:0 1' is not a span"),
    ("\n0,inner", f"\n{10**300},inner", r"p.csv:4: '1000.*\.\.\.' is not a whole number"),
    (",0+3/3:0 1", "", "p.csv:4: segment 0"),
    ("0,inner,retain,0,0+3/3:0 1", "0,inner", "p.csv:4: not enough values"),
    ("retain,4,6+", "retain,5,6+", "p.csv:6: '5' trained positions: give at most as many"),
    ("retain,0,0+", "retain,1,0+", "p.csv:4: '1' trained positions: .* 0 without loss"),
    ("rank 1,F0", "rank 2,F0", "p.csv:8: expected 'rank 1', found 'rank 2'"),
    ("rank 1,F0", "rank 1,G0", "p.csv:8: 'G0' is not an action"),
])  # fmt: skip
def test_a_broken_file_is_refused_with_its_line(old, new, message):
    assert old in SMALL_CSV
    with pytest.raises(UserError, match=message) as caught:
        from_csv(SMALL_CSV.replace(old, new, 1), "p.csv")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_file_that_csv_cannot_read_is_refused():
    with pytest.raises(UserError, match=r"p\.csv: not a plan"):
        from_csv("x" * 200_000 + "\n", "p.csv")


# Plans from files: what fits a step runs, anything else is refused in one line --------------------

COST = CostModel.of_flops(linear=1e6, head=0.0, attention=10.0, action_tokens=4.0)


def forest(prefix=8, suffix=4, num=3, num_groups=2, **options):
    rollouts, groups = flat_rollouts(prefix, suffix, num, num_groups)
    return build(
        rollouts, groups, TreeOptions(**{"min_gain": 0, "segment_tokens": suffix, **options})
    )


def saved(folder, plan):
    path = folder / "plan.csv"
    path.write_text(to_csv(plan), encoding="utf-8")
    return str(path)


def each(num):
    return list(range(num))


def refused(folder, plan, step, ranks=2, chunks=1, microbatch_of=None):
    """The one line that refuses a plan for a step."""
    path = saved(folder, plan)
    with pytest.raises(UserError) as caught:
        PlanFile(path).fitting(step, ranks, chunks, microbatch_of or each(len(step.num_positions)))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (3, 2)])
def test_a_plan_of_the_step_is_run_as_it_is(tmp_path, ranks, chunks):
    step = forest()
    plan = make_plan(step, ranks, num_chunks=chunks, run_ahead=1)
    assert plan != best_plan(step, ranks, num_chunks=chunks) or ranks == 1
    file = PlanFile(saved(tmp_path, plan))
    for _ in range(2):
        assert file.fitting(step, ranks, chunks, each(6)) == plan
    planner = StepPlanner(PrefixConfig(plan_file=file.path), COST, 1, ranks, chunks, None)
    assert planner.plan(joint_forest([step], [each(6)])) == plan


def test_another_pipeline_is_refused(tmp_path):
    step = forest()
    plan = make_plan(step, 2, num_chunks=2)
    assert refused(tmp_path, plan, step, 2, 1).startswith(
        "a plan of 2 ranks with 2 model chunks each, and the pipeline has 2 with 1; change"
    )
    assert "and the pipeline has 4 with 2" in refused(tmp_path, plan, step, 4, 2)


def test_other_segments_are_refused_by_the_first(tmp_path):
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


def test_losses_that_come_too_late_are_refused(tmp_path):
    """Two rollouts a microbatch: the plan is one for each on its own."""
    step = forest()
    plan = make_plan(step, 2)
    assert refused(tmp_path, plan, step, microbatch_of=[0, 0, 1, 1, 2, 2]).startswith(
        "rank 1, place 2: B1"
    )
    PlanFile(saved(tmp_path, plan)).fitting(step, 2, 1, each(6))


def test_a_plan_that_cannot_run_is_refused_before_any_step(tmp_path):
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


def test_what_is_no_plan_is_refused(tmp_path):
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


def test_a_plan_runs_with_the_policies_of_its_file(tmp_path):
    step = forest()
    joint = joint_forest([step], [each(6)])
    own = ("recompute", *["retain"] * 3, "offload", *["retain"] * 3)
    path = saved(tmp_path, replace(make_plan(step, 2), policies=own))

    def planned(memory):
        config = PrefixConfig(plan_file=path, memory=memory)
        return StepPlanner(config, COST, 1, 2, 1, None).plan(joint).policies

    assert planned("retain") == planned("auto") == own
    for memory in ("recompute", "offload"):
        with pytest.raises(UserError, match=f"plan.csv: .* memory '{memory}'; leave --memory out"):
            planned(memory)
    saved(tmp_path, make_plan(step, 2))
    assert planned("retain") == ()
    assert planned("offload") == ("offload", *["retain"] * 3) * 2
