"""What imported rows are grouped by, and which of them are trained."""

import pytest

from megatron_prefix.lab.data.importers import import_file
from megatron_prefix.lab.data.rollouts import read_groups, write_rollouts
from megatron_prefix.lab.rl.batches import advantages
from tests.harness import importing
from tests.harness.command_line import result
from tests.harness.importing import Characters, names, refused, write

source = importing.source  # a fixture
ROWS = {
    "verl": {"input": "ab", "output": "xy", "score": 1.0},
    "messages": {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
        "reward": 1.0,
    },
    "tokens": {"prompt_ids": [1, 2], "response_ids": [3, 4], "reward": 1.0, "old_logprobs": [0, 0]},
}
KINDS = pytest.mark.parametrize("kind", [*ROWS])


def imported(path, kind):
    return list(import_file(path, kind, Characters()))


@KINDS
@pytest.mark.parametrize("field", ["step", "global_step"])
def test_a_group_of_a_later_step_is_another_group(source, kind, field):
    steps = [("a", 1), ("b", 1), ("a", 2), ("a", 1), ("b", 1.0), ("a", "2")]
    write(source, *(ROWS[kind] | {"group": group, field: step} for group, step in steps))
    groups = imported(source, kind)
    assert names(groups) == {"a@1": ["0", "1"], "b": ["0", "1"], "a@2": ["0", "1"]}


def verl_row(uid, score, prompt="ab", **more):
    return {"input": prompt, "output": "xy", "score": score, "uid": uid, **more}


def test_verl_names_sample_rollout_and_output(source):
    """Outputs of a rollout have different prompts, and one sample; samples may be equal texts."""
    rows = [
        verl_row("s-1_0_0", 1.0), verl_row("s-1_0_1", 1.0, "abxyc"), verl_row("s-2_0_0", 1.0),
        verl_row("s-1_1_0", 0.0), verl_row("a_b_10_0", 0.0),
    ]  # fmt: skip
    groups = imported(write(source, *rows), "verl")
    assert names(groups) == {
        "s-1": ["s-1_0_0", "s-1_0_1", "s-1_1_0"], "s-2": ["s-2_0_0"], "a_b": ["a_b_10_0"],
    }  # fmt: skip


def test_verl_counts_a_rollout_once_in_its_group(source):
    """Its GRPO takes each rollout's last output for mean and deviation."""
    rows = [
        verl_row("s_0_1", 3.0), verl_row("s_0_0", 0.5), verl_row("s_0_10", 1.0),
        verl_row("s_1_0", 0.0), verl_row("s_2_0", 0.5), verl_row("s_3_0", 0.0, advantage=7.0),
    ]  # fmt: skip
    (group,) = imported(write(source, *rows), "verl")
    once = [verl_row(f"s_{n}_0", score) for n, score in enumerate((1.0, 0.0, 0.5, 0.0))]
    (singles,) = imported(write(source, *once), "verl")
    assert [rollout.advantage for rollout in singles.rollouts] == [None] * 4
    first, second, third, _ = advantages(singles)
    expected = [first, first, first, second, third, 7.0]
    assert [rollout.advantage for rollout in group.rollouts] == expected
    assert len({*expected}) == 4


@pytest.mark.parametrize("uid", ["task", "task_1", "task_1_x", "_1_2", "task__"])
def test_other_ids_name_rollouts_of_one_prompt(source, uid):
    groups = imported(write(source, verl_row(uid, 1.0), verl_row(uid, 0.0)), "verl")
    assert names(groups) == {"prompt-0000": [uid, f"{uid}#1"]}


@KINDS
@pytest.mark.parametrize("flag", [
    {"loss": False}, {"step_loss_mask": 0}, {"remove_sample": True}, {"training": 0.0},
], ids=str)  # fmt: skip
def test_rows_that_trainers_do_not_train(source, kind, flag):
    """Their rewards still count in their group, as slime has it."""
    ((rollouts),) = [g.rollouts for g in imported(write(source, ROWS[kind] | flag), kind)]
    assert (len(rollouts), rollouts[0].loss, rollouts[0].reward) == (1, (), 1.0)
    assert rollouts[0].prompt_len < len(rollouts[0])


@KINDS
@pytest.mark.parametrize(("field", "value"), [("loss", 0.5), ("remove_sample", "false")])
def test_flags_of_other_values_are_named(source, kind, field, value):
    write(source, ROWS[kind] | {field: value})
    message = refused(source, kind, Characters())
    assert message.startswith(f"1: {field}: not true or false ({value!r})")


@KINDS
def test_untrained_rows_are_counted(source, tmp_path, capsys, monkeypatch, kind):
    load = "megatron_prefix.lab.data.importers.load_tokenizer"
    monkeypatch.setattr(load, lambda name: Characters())
    empty = {
        "verl": {"output": ""},
        "messages": {"messages": ROWS["messages"]["messages"][:1]},
        "tokens": {"response_ids": [], "old_logprobs": []},
    }
    write(source, ROWS[kind], ROWS[kind] | empty[kind], ROWS[kind] | {"loss": False})
    out = str(tmp_path / "out.jsonl")
    summary = result(capsys, "import", kind, str(source), out, "--tokenizer", "some")
    assert (summary["rollouts"], summary["untrained"]) == (3, 2)


@KINDS
def test_names_that_meet_stay_apart(source, kind):
    """A group may be called as one that is named here."""
    rows = [
        ROWS[kind], ROWS[kind] | {"group": "prompt-0000"},
        *(ROWS[kind] | {"group": "g", "step": step} for step in (1, 2)),
        ROWS[kind] | {"group": "g@1"}, ROWS[kind] | {"group": "g"},
    ]  # fmt: skip
    groups = imported(write(source, *rows), kind)
    assert [len(group.rollouts) for group in groups] == [1] * 6
    assert {len(names(groups)), len(rows)} == {6}
    assert names(groups)["prompt-0000"] == ["0"]
    write_rollouts(source.with_name("out.jsonl"), groups)
    assert [*names(list(read_groups(source.with_name("out.jsonl"))))] == [*names(groups)]
