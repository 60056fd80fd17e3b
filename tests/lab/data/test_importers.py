"""Importers of verl's files and of token ids: spans, prompts, groups, and rows that are trained."""

import numpy as np
import pytest

from megatron_prefix.lab.data.importers import import_file
from megatron_prefix.lab.data.rollouts import read_groups, write_rollouts
from megatron_prefix.lab.rl.batches import advantages
from tests.harness.command_line import result
from tests.harness.importing import BOS, Characters, imported, names, refused, write


def test_verl(source):
    """Rows of one prompt are a group wherever they stand; another step is another group."""
    rows = [
        {"input": "ab", "output": "xyz", "gts": "3", "score": 1.0, "step": 1, "acc": True},
        {"input": "cd", "output": "x", "gts": "3", "score": 0, "step": 1},
        {"input": "ab", "output": "", "gts": "3", "score": -1, "step": 1},
        {"input": "ab", "output": "q", "gts": "3", "score": 0.5, "step": 2},
    ]
    groups = list(import_file(write(source, *rows), "verl", Characters()))
    assert names(groups) == {"prompt-0000": ["0", "1"], "prompt-0001": ["0"], "prompt-0002": ["0"]}
    first, second = groups[0].rollouts
    assert first.tokens.tolist() == [BOS, ord("a"), ord("b"), ord("x"), ord("y"), ord("z")]
    assert first.tokens.dtype == np.int32
    assert (first.prompt_len, first.loss, first.reward) == (3, ((3, 6),), 1.0)
    assert (second.prompt_len, second.loss, second.reward) == (3, (), -1.0)


@pytest.mark.parametrize(("changes", "said"), [
    ({"input": 3}, "2: input: not a string (3)"),
    ({"score": None}, "2: reward: missing"),
    ({"score": "1"}, "2: score: not a number ('1')"),
    ({"output": chr(99)}, "2: tokens: token 3 is not in the vocabulary of 99 (99)"),
])  # fmt: skip
def test_verl_refuses(source, changes, said):
    good = {"input": "ab", "output": "b", "score": 1.0}
    write(source, good, good | changes)
    assert refused(source, "verl", Characters(), vocab_size=99).startswith(said)


FLAGS = [True, False, True, True]


@pytest.mark.parametrize("row", [
    {"prompt_ids": [1, 2], "response_ids": [3, 4, 5, 6], "loss_mask": [1, 0, 1, 1]},
    {"prompt_token_ids": [1, 2], "completion_ids": [3, 4, 5, 6], "response_mask": FLAGS},
    {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5, 6], "completion_mask": [1.0, 0.0, 1, 1]},
    {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 0, 1, 1]},
    {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100, -100, 3, -100, 5, 6]},
    {"tokens": [1, 2, 3, 4, 5, 6], "response_length": 4, "loss_mask": [1, 0, 1, 1]},
    {"tokens": [1, 2, 3, 4, 5, 6], "prompt_len": 2, "labels": [3, -100, 5, 6]},
])  # fmt: skip
@pytest.mark.parametrize("logprobs", [[-1.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0]])
def test_tokens(source, row, logprobs):
    rollout = imported(source, row | {"reward": 1, "rollout_log_probs": logprobs}, "tokens")
    assert rollout.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert (rollout.prompt_len, rollout.loss) == (2, ((2, 3), (4, 6)))
    assert rollout.old_logprobs.tolist() == [-1.0, -3.0, -4.0]


def test_tokens_without_a_mask_train_the_response(source):
    rows = [
        {"prompt_ids": [1, 2], "response_ids": [3, 4], "score": 0.5, "group_index": 0},
        {"tokens": [1, 2, 5], "response_length": 1, "score": 1, "group_index": 0},
        {"prompt_ids": [1, 2], "response_ids": [], "score": 1, "group_index": 0},
    ]
    ((group),) = import_file(write(source, *rows), "tokens")
    assert [r.loss for r in group.rollouts] == [((2, 4),), ((2, 3),), ()]
    assert names([group]) == {"0": ["0", "1", "2"]}


# Masks of every spelling, pads, lengths -----------------------------------------------------------


PADDED = {
    "input_ids": [0, 0, 5, 6, 7, 8, 9, 0], "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0], "reward": 1,
}  # fmt: skip
LOSS_MASK = [0, 0, 0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize("more", [
    {"loss_mask": LOSS_MASK},
    {"loss_mask": [bool(flag) for flag in LOSS_MASK]},
    {"prompt_len": 4, "loss_mask": LOSS_MASK[4:]},
    {"response_length": 4, "loss_mask": LOSS_MASK[4:]},
    {"labels": [-100, -100, -100, -100, 7, -100, 9, 0]},
])  # fmt: skip
@pytest.mark.parametrize("logprobs", [[-1.0, -3.0], [-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0, -4.0]])
def test_pads_are_dropped(source, more, logprobs):
    rollout = imported(source, PADDED | more | {"old_logprobs": logprobs}, "tokens")
    assert rollout.tokens.tolist() == [5, 6, 7, 8, 9]
    assert (rollout.prompt_len, rollout.loss) == (2, ((2, 3), (4, 5)))
    assert rollout.old_logprobs.tolist() == [-1.0, -3.0]


def test_pads_of_a_prompt_that_is_a_list_of_its_own(source):
    row = {"prompt_ids": [0, 5, 6], "prompt_mask": [0, 1, 1], "completion_ids": [7, 8, 0]}
    rollout = imported(source, row | {"completion_mask": [1, 1, 0], "reward": 1}, "tokens")
    assert (rollout.tokens.tolist(), rollout.prompt_len) == ([5, 6, 7, 8, 0], 2)
    assert rollout.loss == ((2, 4),)


MASKED = PADDED | {"loss_mask": LOSS_MASK}
WHOLE = {"input_ids": [1, 2, 3], "prompt_len": 1}
OTHERS = "holds values other than 0 and 1 (entry 1 is "
UNCLEAR = [
    ({"attention_mask": [0, 0, 1, 1, 0, 1, 1, 0]}, "attention_mask: is 0 inside the rollout"),
    ({"attention_mask": [0] * 8}, "attention_mask: is 0 for all 8 tokens of the row"),
    ({"attention_mask": [1] * 7}, "attention_mask: not one entry for each of 8 tokens (7)"),
    ({"loss_mask": None, "prompt_len": 4}, "prompt_len: it is not clear whether 4 counts the"),
    ({"loss_mask": None, "response_length": 3},
     "response_length: it is not clear whether 3 counts the padding on the right"),
    ({"prompt_len": 4}, "prompt_len: it is not clear whether 4 counts the padding on the left"),
]  # fmt: skip
"""Masks of pads that cannot be followed."""


@pytest.mark.parametrize(("row", "said"), [
    ({}, "tokens: missing"),
    ({"input_ids": [1, 2, 3]}, "loss_mask: missing (nothing says what is trained)"),
    ({"input_ids": [1, -2, 3], "prompt_len": 1}, "input_ids: token 1 is negative (-2)"),
    ({"input_ids": [1, 2, 3], "prompt_len": 0}, "prompt_len: outside 1..3"),
    ({"input_ids": [1, 2, 3], "response_length": 4}, "response_length: outside 0..2"),
    ({"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}, "prompt_len: outside 1..3"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "loss_mask: neither as long as"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "prompt_len": 2},
     "loss: span [1, 3] begins in"),
    ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels: differ from the tokens"),
    ({"input_ids": [1, 10, 3], "prompt_len": 1}, "tokens: token 1 is not in the vocabulary"),
    (WHOLE | {"old_logprobs": [-1.0]},
     "old_logprobs: 1 entries for 2 trained tokens; give one for each"),
    (WHOLE | {"loss_mask": [1, 1e-9, 1]}, f"loss_mask: {OTHERS}"),
    (WHOLE | {"response_mask": [1, "1", 1]}, f"response_mask: {OTHERS}"),
    (WHOLE | {"attention_mask": [1, 2, 1]}, f"attention_mask: {OTHERS}"),
    *((MASKED | changes, said) for changes, said in UNCLEAR),
])  # fmt: skip
def test_tokens_refuse(source, row, said):
    write(source, {"input_ids": [1, 2], "prompt_len": 1, "reward": 1}, row | {"reward": 1})
    assert refused(source, "tokens", vocab_size=10).startswith(f"2: {said}")


# What rows are grouped by, and which of them are trained ------------------------------------------


ROWS = {
    "verl": {"input": "ab", "output": "xy", "score": 1.0},
    "messages": {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
        "reward": 1.0,
    },
    "tokens": {"prompt_ids": [1, 2], "response_ids": [3, 4], "reward": 1.0, "old_logprobs": [0, 0]},
}
KINDS = pytest.mark.parametrize("kind", [*ROWS])


def groups_of(path, kind):
    return list(import_file(path, kind, Characters()))


@KINDS
@pytest.mark.parametrize("field", ["step", "global_step"])
def test_a_group_of_a_later_step_is_another_group(source, kind, field):
    steps = [("a", 1), ("b", 1), ("a", 2), ("a", 1), ("b", 1.0), ("a", "2")]
    write(source, *(ROWS[kind] | {"group": group, field: step} for group, step in steps))
    groups = groups_of(source, kind)
    assert names(groups) == {"a@1": ["0", "1"], "b": ["0", "1"], "a@2": ["0", "1"]}


def verl_row(uid, score, prompt="ab", **more):
    return {"input": prompt, "output": "xy", "score": score, "uid": uid, **more}


def test_verl_names_sample_rollout_and_output(source):
    """Outputs of a rollout have different prompts, and one sample; samples may be equal texts."""
    rows = [
        verl_row("s-1_0_0", 1.0), verl_row("s-1_0_1", 1.0, "abxyc"), verl_row("s-2_0_0", 1.0),
        verl_row("s-1_1_0", 0.0), verl_row("a_b_10_0", 0.0),
    ]  # fmt: skip
    groups = groups_of(write(source, *rows), "verl")
    assert names(groups) == {
        "s-1": ["s-1_0_0", "s-1_0_1", "s-1_1_0"], "s-2": ["s-2_0_0"], "a_b": ["a_b_10_0"],
    }  # fmt: skip


def test_verl_counts_a_rollout_once_in_its_group(source):
    """Its GRPO takes each rollout's last output for mean and deviation."""
    rows = [
        verl_row("s_0_1", 3.0), verl_row("s_0_0", 0.5), verl_row("s_0_10", 1.0),
        verl_row("s_1_0", 0.0), verl_row("s_2_0", 0.5), verl_row("s_3_0", 0.0, advantage=7.0),
    ]  # fmt: skip
    (group,) = groups_of(write(source, *rows), "verl")
    once = [verl_row(f"s_{n}_0", score) for n, score in enumerate((1.0, 0.0, 0.5, 0.0))]
    (singles,) = groups_of(write(source, *once), "verl")
    assert [rollout.advantage for rollout in singles.rollouts] == [None] * 4
    first, second, third, _ = advantages(singles)
    expected = [first, first, first, second, third, 7.0]
    assert [rollout.advantage for rollout in group.rollouts] == expected
    assert len({*expected}) == 4


@pytest.mark.parametrize("uid", ["task", "task_1", "task_1_x", "_1_2", "task__"])
def test_other_ids_name_rollouts_of_one_prompt(source, uid):
    groups = groups_of(write(source, verl_row(uid, 1.0), verl_row(uid, 0.0)), "verl")
    assert names(groups) == {"prompt-0000": [uid, f"{uid}#1"]}


@KINDS
@pytest.mark.parametrize("flag", [
    {"loss": False}, {"step_loss_mask": 0}, {"remove_sample": True}, {"training": 0.0},
], ids=str)  # fmt: skip
def test_rows_that_trainers_do_not_train(source, kind, flag):
    """Their rewards still count in their group, as slime has it."""
    ((rollouts),) = [g.rollouts for g in groups_of(write(source, ROWS[kind] | flag), kind)]
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
    groups = groups_of(write(source, *rows), kind)
    assert [len(group.rollouts) for group in groups] == [1] * 6
    assert {len(names(groups)), len(rows)} == {6}
    assert names(groups)["prompt-0000"] == ["0"]
    write_rollouts(source.with_name("out.jsonl"), groups)
    assert [*names(list(read_groups(source.with_name("out.jsonl"))))] == [*names(groups)]
