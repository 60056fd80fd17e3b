"""Importing token ids: masks of every spelling, pads, lengths."""

import pytest

from megatron_prefix.lab.data.importers import import_file
from tests.harness import importing
from tests.harness.importing import refused, write

source = importing.source  # a fixture
PADDED = {
    "input_ids": [0, 0, 5, 6, 7, 8, 9, 0], "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0], "reward": 1,
}  # fmt: skip
LOSS_MASK = [0, 0, 0, 0, 1, 0, 1, 1]


def imported(path, row):
    ((group,),) = ([g.rollouts for g in import_file(write(path, row), "tokens")],)
    (rollout,) = group
    return rollout


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "on", "off"),
    [("loss_mask", 1, 0), ("response_mask", True, False), ("completion_mask", 1.0, 0.0)],
)
def test_masks_have_three_spellings(source, field, on, off):
    row = {"input_ids": [1, 2, 3, 4, 5], field: [off, off, on, off, on], "reward": 1}
    assert imported(source, row).loss == ((2, 3), (4, 5))


@pytest.mark.parametrize(
    ("field", "value"), [("loss_mask", 1e-9), ("response_mask", "1"), ("attention_mask", 2)]
)
def test_a_mask_of_other_values_is_named(source, field, value):
    row = {"input_ids": [1, 2, 3], "prompt_len": 1, field: [1, value, 1], "reward": 1}
    write(source, {"input_ids": [1, 2], "prompt_len": 1, "reward": 1}, row)
    message = refused(source, "tokens")
    assert message.startswith(f"2: {field}: holds values other than 0 and 1 (entry 1 is ")


# Pads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"loss_mask": LOSS_MASK},
        {"loss_mask": [bool(flag) for flag in LOSS_MASK]},
        {"prompt_len": 4, "loss_mask": LOSS_MASK[4:]},
        {"response_length": 4, "loss_mask": LOSS_MASK[4:]},
        {"labels": [-100, -100, -100, -100, 7, -100, 9, 0]},
    ],
)
@pytest.mark.parametrize("logprobs", [[-1.0, -3.0], [-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0, -4.0]])
def test_pads_are_dropped(source, more, logprobs):
    rollout = imported(source, PADDED | more | {"old_logprobs": logprobs})
    assert rollout.tokens.tolist() == [5, 6, 7, 8, 9]
    assert (rollout.prompt_len, rollout.loss) == (2, ((2, 3), (4, 5)))
    assert rollout.old_logprobs.tolist() == [-1.0, -3.0]


def test_pads_of_a_prompt_that_is_a_list_of_its_own(source):
    row = {"prompt_ids": [0, 5, 6], "prompt_mask": [0, 1, 1], "completion_ids": [7, 8, 0]}
    rollout = imported(source, row | {"completion_mask": [1, 1, 0], "reward": 1})
    assert (rollout.tokens.tolist(), rollout.prompt_len) == ([5, 6, 7, 8, 0], 2)
    assert rollout.loss == ((2, 4),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_mask": [0, 0, 1, 1, 0, 1, 1, 0]}, "attention_mask: is 0 inside the rollout"),
        ({"attention_mask": [0] * 8}, "attention_mask: is 0 for all 8 tokens of the row"),
        ({"attention_mask": [1] * 7}, "attention_mask: not one entry for each of 8 tokens (7)"),
        ({"loss_mask": None, "prompt_len": 4}, "prompt_len: it is not clear whether 4 counts the"),
        (
            {"loss_mask": None, "response_length": 3},
            "response_length: it is not clear whether 3 counts the padding on the right",
        ),
        ({"prompt_len": 4}, "prompt_len: it is not clear whether 4 counts the padding on the left"),
    ],
)
def test_masks_of_pads_that_cannot_be_followed(source, changes, said):
    write(source, PADDED | {"loss_mask": LOSS_MASK} | changes)
    assert refused(source, "tokens").startswith(f"1: {said}")


# Lengths ------------------------------------------------------------------------------------------
