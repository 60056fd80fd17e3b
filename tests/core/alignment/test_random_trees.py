"""Random trees through the prefix schedule in fp64, against plain autograd on whole sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.run import schedule
from megatron_prefix.tree import Pairs
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract, Microbatch

pytestmark = pytest.mark.turns

# By name what Megatron itself recomputes in them.
MODELS = {
    "tiny-llama": ("tiny-llama", "none"),
    "tiny-qwen3": ("tiny-qwen3", "none"),
    "tiny-llama, full": ("tiny-llama", "full"),
    "tiny-qwen3, selective": ("tiny-qwen3", "selective"),
}


@dataclass(frozen=True, repr=False)
class Pair:
    """A model for the prefix schedule, and its twin for plain autograd and Megatron's schedule."""

    model: Any
    twin: Any


Models = dict[str, Pair]


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with one_rank():
        made = {
            name: Pair(small_model(model, recompute=recompute), small_model(model, wrap_ddp=False))
            for name, (model, recompute) in MODELS.items()
        }
        yield made
        made.clear()


def rollout(tokens: Sequence[int], *trained: int) -> Pairs:
    """A rollout whose listed positions are trained."""
    mask = np.isin(np.arange(len(tokens) - 1), trained)
    return Pairs(np.array(tokens[:-1]), np.array(tokens[1:]), mask)


PROMPT, CALL = list(range(10, 22)), list(range(30, 37))
# name: groups of microbatches of rollouts
CASES: dict[str, list[list[list[Pairs]]]] = {
    "one rollout": [[[rollout(PROMPT, 3, 4)]]],
    "one position": [[[rollout([1, 2], 0)], [rollout([1, 2], 0)], [rollout([1, 3], 0)]]],
    "groups of one": [[[rollout(PROMPT, 8)]], [[rollout([*PROMPT, 1], 8)]]],
    "no loss at all": [[[rollout([*PROMPT, 1])], [rollout([*PROMPT, 2])]]],
    "one without loss": [[[rollout([*PROMPT, 1])], [rollout([*PROMPT, 2], 11)]]],
    "copies": [[[rollout(PROMPT, 5, 6)]] * 4],
    "copies in one microbatch": [[[rollout(PROMPT, 5, 6)] * 3]],
    "copies with other loss": [[[rollout(PROMPT, 2)], [rollout(PROMPT, 9, 10)], [rollout(PROMPT)]]],
    "one is the start of the other": [
        [[rollout(PROMPT, 9)], [rollout(PROMPT + CALL, 12, 15)], [rollout(PROMPT + CALL + [1], 18)]]
    ],
    "shared turns with loss": [
        [
            [rollout(PROMPT + CALL + [1, 2], 11, 12, 13, 18, 19)],
            [rollout(PROMPT + CALL + [3, 4, 5], 11, 12, 18)],
            [rollout(PROMPT + CALL[:3] + [6], 11, 12, 14)],
            [rollout([*PROMPT, 7, 8], 12)],
        ]
    ],
    "a microbatch across branches": [
        [
            [rollout(PROMPT + CALL + [1], 12), rollout([*PROMPT, 2], 11)],
            [rollout(PROMPT + CALL + [3, 4], 15), rollout(PROMPT[:4], 2)],
        ]
    ],
    "groups that start alike": [
        [[rollout([*PROMPT, 1, 2], 11)], [rollout([*PROMPT, 3], 11)]],
        [[rollout([*PROMPT, 1, 2], 12)], [rollout([*PROMPT, 4], 11)]],
    ],
}


def as_items(groups: Sequence[Sequence[Sequence[Pairs]]]) -> list[Microbatch]:
    """Microbatches of the groups, taken in turns."""
    turns = itertools.zip_longest(*groups)
    flat = [(g, rollouts) for turn in turns for g, rollouts in enumerate(turn) if rollouts]
    return [steps.microbatch(rollouts, g, uid) for uid, (g, rollouts) in enumerate(flat)]


def test_a_step_without_a_loss_function_returns_outputs(models: Models) -> None:
    """Megatron's schedules append the model's output then; ours is zero in front of the loss."""
    model, twin = models["tiny-llama"].model, models["tiny-llama"].twin
    items = as_items(CASES["shared turns with loss"])

    def step(data_iterator: Iterator[Microbatch], chunk: Any) -> Any:
        return Contract().step(data_iterator, chunk)[0], None

    ours = schedule.PrefixSchedule(PrefixConfig(min_gain=0))
    found = steps.call(ours, step, model, items, forward_only=True)
    expected = steps.call(get_forward_backward_func(), step, twin, items, forward_only=True)
    for output, whole, item in zip(found, expected, items, strict=True):
        first = int(item["loss_mask"][0].nonzero()[0])
        assert output.shape == whole.shape
        assert_close(output[:, first:], whole[:, first:], whole.shape[1])
