"""Random trees through the prefix schedule in fp64, against plain autograd on whole sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.config import MEMORY_POLICIES, PrefixConfig
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.plans.forest import max_depth
from megatron_prefix.run import schedule
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.tree import Pairs, TreeOptions
from tests.harness import steps
from tests.harness.fuzzing import rounds
from tests.harness.one_rank import change_rank, one_rank, small_model
from tests.harness.steps import Contract, Microbatch
from tests.harness.trees import rollout_sets, tree_options

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


contracts = st.builds(
    Contract,
    triple=st.booleans(),
    per_token=st.booleans(),
    logits=st.booleans(),
    sequence_level=st.booleans(),
    scale=st.sampled_from([None, 8.0]),
)


@st.composite
def step_inputs(draw: Any) -> list[Microbatch]:
    """Rollouts in microbatches of one to three samples of one group, in any order."""
    rollouts, groups = draw(rollout_sets())
    items: list[Microbatch] = []
    for group in dict.fromkeys(groups):
        members = [rollout for rollout, g in zip(rollouts, groups, strict=True) if g == group]
        while members:
            num = draw(st.integers(1, 3))
            items.append(steps.microbatch(members[:num], f"group {group}", len(items)))
            members = members[num:]
    return draw(st.permutations(items))


def schedule_with(
    options: TreeOptions,
    contract: Contract,
    monkeypatch: pytest.MonkeyPatch,
    memory: str = "retain",
    memory_budget_gb: float = 0.0,
    cache_host_layers: int = 0,
) -> schedule.PrefixSchedule:
    """The prefix schedule on trees made with `options`, whatever the layout asks for."""
    change_rank(monkeypatch, alignment=options.multiple)
    config = PrefixConfig(
        chunk_tokens=options.chunk_tokens,
        segment_tokens=options.segment_tokens,
        min_gain=options.min_gain,
        loss_in_leaves=options.loss_in_leaves,
        kernel="math",
        memory=memory,
        memory_budget_gb=memory_budget_gb,
        cache_host_layers=cache_host_layers,
    )
    return schedule.PrefixSchedule(config)


def assert_logs(found: list[Any], expected: list[Any], num_positions: int) -> None:
    """What a schedule returns, log by log."""
    assert [log["uid"] for log in found] == [log["uid"] for log in expected]
    for log, wanted in zip(found, expected, strict=True):
        assert log.keys() == wanted.keys()
        for name in set(log) - {"uid"}:
            assert log[name].shape == wanted[name].shape
            # Sums of log-probs of both signs: judged beside what is summed.
            size = wanted[name].new_tensor([float(num_positions)])
            pair = (torch.cat([x[name].flatten(), size]) for x in (log, wanted))
            assert_close(*pair, num_positions, what=name)


def check(
    pair: Pair,
    items: Sequence[Microbatch],
    contract: Contract,
    schedule: schedule.PrefixSchedule,
) -> None:
    """Gradients against plain autograd, logs against Megatron's, all three ways to call."""
    model, twin = pair.model, pair.twin
    stock = get_forward_backward_func()
    for chunk in (model, twin):
        contract.configure(chunk)
    wanted = steps.plain(twin, contract, items)
    num_positions = sum(item["tokens"].numel() for item in items)

    steps.zero_gradients(model)
    logs = steps.call(schedule, contract.step, model, items)
    assert schedule.report is not None
    assert schedule.report.forest.raw_tokens == num_positions
    steps.assert_gradients(steps.gradients(model), wanted, num_positions)
    expected = steps.call(stock, contract.step, twin, items, forward_only=True)
    assert_logs(logs, expected, num_positions)

    before = steps.gradients(model)
    logs = steps.call(schedule, contract.step, model, items, forward_only=True)
    assert_logs(logs, expected, num_positions)
    collect = dict(forward_only=True, collect_non_loss_data=True)
    assert_logs(
        steps.call(schedule, contract.step, model, items, **collect),
        steps.call(stock, contract.step, twin, items, **collect),
        num_positions,
    )
    after = steps.gradients(model)
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items())


# Shrinking takes minutes, and a failing example is small as it is.
@settings(
    max_examples=rounds(24, 500, fewest=12), phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(
    name=st.sampled_from(sorted(MODELS)),
    items=step_inputs(),
    contract=contracts,
    options=tree_options(),
    memory=st.sampled_from(MEMORY_POLICIES),
    # About what one of these steps takes, so that "offload" now and then has no room.
    memory_budget_gb=st.sampled_from([0.0, 1e-5, 2e-4]),
    cache_host_layers=st.sampled_from([0, 0, 1, 2]),
)
def test_exact_against_plain_autograd(
    models: Models,
    name: str,
    items: list[Microbatch],
    contract: Contract,
    options: TreeOptions,
    memory: str,
    memory_budget_gb: float,
    cache_host_layers: int,
) -> None:
    limits = memory, memory_budget_gb, cache_host_layers
    with pytest.MonkeyPatch.context() as monkeypatch:
        schedule = schedule_with(options, contract, monkeypatch, *limits)
        check(models[name], items, contract, schedule)


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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "options",
    [
        TreeOptions(min_gain=0),
        TreeOptions(min_gain=0, multiple=4, share="batch", segment_tokens=1),
        TreeOptions(min_gain=0, chunk_tokens=5, loss_in_leaves=True, segment_tokens=0),
        TreeOptions(min_gain=10**6),
    ],
    ids=["plain", "align 4, whole batch", "chunks, loss in leaves", "nothing shared"],
)
def test_shapes_by_name(
    models: Models, monkeypatch: pytest.MonkeyPatch, name: str, options: TreeOptions
) -> None:
    contract = Contract(sequence_level=True)
    schedule = schedule_with(options, contract, monkeypatch)
    check(models["tiny-qwen3"], as_items(CASES[name]), contract, schedule)


def test_the_cases_share_what_their_names_say(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an equal result proves nothing."""
    contract = Contract()
    counts = {}
    for name, groups in CASES.items():
        schedule = schedule_with(TreeOptions(min_gain=0), contract, monkeypatch)
        schedule.callbacks = Callbacks(lambda call: call["loss_mask"])
        model = models["tiny-llama"].model
        contract.configure(model)
        steps.call(schedule, contract.step, model, as_items(groups), forward_only=True)
        assert schedule.report is not None
        forest = schedule.report.forest
        inner_loss = any(s.inner and s.scored for s in forest.segments)
        counts[name] = (forest.raw_tokens, forest.executed_tokens, max_depth(forest), inner_loss)
    assert counts == {
        "one rollout": (11, 11, 1, False),
        "one position": (3, 2, 1, False),
        "groups of one": (23, 12, 2, True),
        "no loss at all": (24, 13, 2, False),
        "one without loss": (24, 13, 2, False),
        "copies": (44, 11, 1, False),
        "copies in one microbatch": (33, 11, 1, False),
        "copies with other loss": (33, 11, 1, False),
        "one is the start of the other": (48, 19, 3, True),
        "shared turns with loss": (69, 26, 4, True),
        "a microbatch across branches": (78, 46, 4, True),
        "groups that start alike": (50, 15, 2, False),
    }


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
