"""Importers of verl's files and of token ids: groups, spans and prompts; options; the command."""

import numpy as np
import pytest

from megatron_prefix.lab.data.importers import import_file
from tests.harness import importing
from tests.harness.importing import BOS, Characters, imported, names, refused, write

source = importing.source  # a fixture


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
