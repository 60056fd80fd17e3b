"""Actions and plans as text: what is written is read back, what is wrong is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.table import from_csv, parse_action, to_csv
from megatron_prefix.lab.plans.messages import without_messages
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Action, Plan, Transfer
from megatron_prefix.plan.check import PlanError
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.tree import Forest, TreeOptions, build
from tests.harness.fuzzing import rounds
from tests.harness.trees import flat_rollouts, rollout_sets, tree_options


def small_plan() -> Plan:
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


@given(st.sampled_from("FBSR"), st.integers(0, 10**6), st.integers(0, 99), st.integers(0, 99))
def test_an_action_is_read_back(kind, segment, chunk, peer) -> None:
    action = Action(kind, segment, chunk, peer if kind in "SR" else -1)
    assert parse_action(str(action)) == action
    assert parse_action(f" {action} ") == action


def test_actions_as_text() -> None:
    assert str(Action("F", 3)) == "F3"
    assert str(Action("B", 12, 1)) == "B12.1"
    assert str(Action("S", 3, 0, 1)) == "S3>1"
    assert str(Action("R", 3, 0, 1)) == "R3<1"
    assert str(Action("S", 3, 1, 0)) == "S3.1>0"
    assert parse_action("R3<0").peer == 0


@pytest.mark.parametrize(
    "text",
    [
        *["", "F", "3", "f3", "F-1", "F3.", "F3.1.2", "W3", "F 3", "F3B3"],
        *["S3", "R3", "S3<1", "R3>1", "F3>1", "B3<1", "S3>", "S3>-1", "S3>1.1"],
    ],
)
def test_what_is_no_action_is_refused(text) -> None:
    with pytest.raises(UserError, match="is not an action"):
        parse_action(text)


def test_stages_are_counted_from_the_embedding() -> None:
    plan = Plan((), ((), (), ()), num_chunks=2)
    assert (plan.num_ranks, plan.num_stages) == (3, 6)
    assert [plan.stage(rank, chunk) for chunk in (0, 1) for rank in (0, 1, 2)] == [*range(6)]


def test_a_plan_as_csv() -> None:
    assert to_csv(small_plan()) == SMALL_CSV


@given(rollout_sets(), tree_options(), st.integers(1, 8))
@settings(max_examples=rounds(50, 500))
def test_a_plan_is_read_back(sets, options, num_ranks) -> None:
    plan = make_plan(build(*sets, options), num_ranks)
    assert from_csv(to_csv(plan)) == plan
    assert from_csv(to_csv(plan).replace("\n", "\r\n")) == plan


def test_virtual_stages_are_read_back() -> None:
    chunked = make_plan(Forest(small_plan().segments, (8, 8), (6, 6)), 2, num_chunks=2)
    assert from_csv(to_csv(chunked)) == chunked
    assert ",F0.1," in to_csv(chunked)


def test_policies_are_read_back() -> None:
    mixed = replace(small_plan(), policies=("recompute", "offload", "retain"))
    assert ",inner,offload,0,3+3/3:0 1<0.0\n" in to_csv(mixed)
    assert from_csv(to_csv(mixed)) == mixed
    plain = replace(mixed, policies=("retain",) * 3)
    assert from_csv(to_csv(plain)) == small_plan()


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


def test_a_plan_whose_segments_cross_ranks_is_read_back() -> None:
    plan = from_csv(ACROSS_CSV)
    assert [segment.source for segment in plan.segments] == [2, -1, -1]
    assert plan.transfers == (Transfer(1, 1, (0,)), Transfer(1, 2, (0, 1)))
    assert to_csv(plan) == ACROSS_CSV
    simulate(without_messages(plan))
    assert str(without_messages(plan).programs[0][0]) == "F0"


@pytest.mark.parametrize("cell", ["S2>1", "R2<1", "S0>1", "S1>3", "R9<1"])
def test_a_message_that_no_segment_has_is_found(cell) -> None:
    plan = from_csv(ACROSS_CSV.replace(",F2,", f",{cell},F2,"))
    with pytest.raises(PlanError, match=f"rank 0, place 2: {cell} does not exist"):
        simulate(without_messages(plan))


@pytest.mark.parametrize("cell", ["2", "<", "<-1", ">1", ">1:", ">1:0;", ">1:0 ;>2:0", "<1;>2:0"])
def test_ranks_that_cannot_be_read(cell) -> None:
    with pytest.raises(UserError, match=r"p\.csv:4: "):
        from_csv(ACROSS_CSV.replace(",<2,", f",{cell},"), "p.csv")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (SMALL_CSV, "", "p.csv: not a plan"),
        (SMALL_CSV, "a,b\n", "p.csv: not a plan"),
        ("segment,kind", "part,kind", "p.csv:3: not the columns of a plan"),
        ("plan,4,2,1", "plan,2,2,1", "p.csv:2: a plan of version 2, .* make one with `megatron"),
        ("plan,4,2,1", "plan,6,2,1", "p.csv:2: a plan of version 6, .* reads versions 4 and 5"),
        ("plan,4,2,1", "plan,5,2,1", "p.csv:3: not the columns of a plan"),
        ("plan,4,2,1", "plan,4,0,1", r"p.csv:2: ranks 0"),
        ("plan,4,2,1", "plan,4,x,1", "p.csv:2: .* whole numbers"),
        ("plan,4,2,1", "plan,4,2", "p.csv:2: .* whole numbers"),
        ("plan,4,2,1", "plan,4,2,1,1", "p.csv:2: .* whole numbers"),
        ("plan,4,2,1", f"plan,4,{10**300},1", "p.csv:2: .* whole numbers"),
        ("plan,4,2,1", "plan,4,9,1", "5 lines after the header, 9 ranks announced"),
        ("plan,4,2,1", "plan,4,2,999999999", "p.csv:2: 3 segments on 999999999 model chunks"),
        ("plan,4,2,1", "plan,4,2,5", "p.csv:2: 3 segments on 5 model chunks"),
        (",kind,policy,", ",kind,", "p.csv:3: not the columns of a plan"),
        ("\n1,inner", "\n2,inner", "p.csv:5: segment 2: number from 0"),
        ("\n1,inner", "\n1,inside", "p.csv:5: kind 'inside'"),
        ("1<0.0", "1<0", r"p.csv:5: '3\+3/3:0 1<0' is not a span: .* <segment.span of its parent"),
        ("1<0.0", "1<-1.0", r"p.csv:5: '3\+3/3:0 1<-1.0' is not a span"),
        ("1<0.0", f"1<{10**300}.0", r"p.csv:5: '3\+3/3:0 1<1000.*\.\.\.' is not a span"),
        ("inner,retain", "inner,forget", "p.csv:4: policy 'forget': inner can have retain or rec"),
        (
            "scored,retain",
            "scored,recompute",
            r"p.csv:6: policy 'recompute': wave\+scored can have",
        ),
        ("0+3/3:0 1", "0+3:0 1", r"p.csv:4: '0\+3:0 1' is not a span"),
        ("0+3/3:0 1", f"0+{10**300}/{10**300}:0 1", r"p.csv:4: '0\+1000.*\.\.\.' is not a span"),
        ("\n0,inner", f"\n{10**300},inner", r"p.csv:4: '1000.*\.\.\.' is not a whole number"),
        (",0+3/3:0 1", "", "p.csv:4: segment 0"),
        ("rank 1,F0", f"rank 1,F{10**300}", r"p.csv:8: 'F1000.*\.\.\.' is not an action"),
        ("0,inner,retain,0,0+3/3:0 1", "0,inner", "p.csv:4: not enough values"),
        ("retain,4,6+", "retain,5,6+", "p.csv:6: '5' trained positions: give at most as many"),
        ("retain,0,0+", "retain,1,0+", "p.csv:4: '1' trained positions: .* 0 without loss"),
        ("retain,4,6+", "retain,x,6+", "p.csv:6: 'x' is not a whole number"),
        ("rank 1,F0", "rank 2,F0", "p.csv:8: expected 'rank 1', found 'rank 2'"),
        ("rank 1,F0", "rank 1,G0", "p.csv:8: 'G0' is not an action"),
        ("rank 1,F0", "rank 1,", "p.csv:8: '' is not an action"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(old, new, message) -> None:
    assert old in SMALL_CSV
    with pytest.raises(UserError, match=message) as caught:
        from_csv(SMALL_CSV.replace(old, new, 1), "p.csv")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_file_that_csv_cannot_read_is_refused() -> None:
    with pytest.raises(UserError, match=r"p\.csv: not a plan"):
        from_csv("x" * 200_000 + "\n", "p.csv")
