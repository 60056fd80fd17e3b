"""What groups on several data-parallel ranks could share: estimates, and who exchanges what."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.across import step as across_step
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.refusals.table import ACROSS_EXPERTS, ACROSS_GATHERS
from megatron_prefix.run.across import scattered
from megatron_prefix.run.across.scattered import LENGTHS, SharingAcrossRanks, beginnings, tell
from megatron_prefix.run.rank import default_groups
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.trainers.table import VERL
from megatron_prefix.tree import Pairs, TreeOptions, build
from megatron_prefix.tree.beginnings import least_saved
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract, microbatch

PROMPT, ANSWER = 60, 20


def rollout(group: int, number: int, prompt: int = PROMPT) -> Pairs:
    """One of a group's, whose prompt the group's number alone decides."""
    first = np.random.default_rng(group).integers(0, 60, prompt)
    last = np.random.default_rng([group, number]).integers(0, 60, ANSWER)
    tokens = np.r_[first, last]
    return Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= prompt - 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_the_context_parallel_ranks_speaks_for_all(rank: int) -> None:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 2, rank=lambda: rank), dp_cp=alone)
    found = scattered.exchange([rollout(0, 0), rollout(0, 1)], groups)
    assert (found.tokens, found.shared > 0) == ((158, True) if rank == 0 else (0, False))


@pytest.mark.parametrize("prompt", [5, 31, 33, 60, 400, 3000])
def test_the_estimate_is_at_most_a_quarter_below_the_tree(prompt: int) -> None:
    rollouts = [rollout(group, number, prompt) for group in range(3) for number in range(4)]
    forest = build(rollouts, [0] * 12, TreeOptions(min_gain=0))
    truth = forest.raw_tokens - forest.executed_tokens
    found = least_saved(beginnings(rollouts), LENGTHS)
    assert found <= truth
    assert prompt < scattered.SHORTEST or found >= truth / scattered.GROWTH - 12
    assert least_saved(beginnings(rollouts[::4]), LENGTHS) == 0


def look(mode: str, together: bool, num_steps: int) -> tuple[list[int], SharingAcrossRanks | None]:
    """Steps in which this rank took part in an exchange, and what the last one found."""
    layout = Layout(dp=2, pp=2)
    runtime.initialize(layout)
    model = small_model(dtype=torch.float32, layout=layout)
    schedule = PrefixSchedule(PrefixConfig(mode=mode, min_gain=0, kernel="math"))
    rank = torch.distributed.get_rank(default_groups().dp_cp)
    begun: list[int] = []
    exchanges: list[int] = []
    stock = scattered.exchange

    def counted(*args: Any) -> SharingAcrossRanks:
        exchanges.append(begun[-1])
        return stock(*args)

    scattered.exchange = counted  # type: ignore[assignment]  # the rank's own process
    for number in range(num_steps):
        begun.append(number)
        groups = [(rank, 0), (rank, 1)] if together else [(0, rank), (1, rank)]
        items = [microbatch([rollout(*one)], 0, n) for n, one in enumerate(groups)]
        steps.zero_gradients(model)
        steps.call(schedule, Contract().step, model, items, forward_only=True)
        steps.call(schedule, Contract().step, model, items)
    return exchanges, schedule.across_ranks.last


@pytest.mark.parametrize("mode", ["observe", "auto", "on"])
def test_ranks_exchange_every_fifty_steps_but_never_if_on(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scattered.EVERY == 50
    monkeypatch.setattr(scattered, "EVERY", 5)  # counted alike, and in fewer steps
    ranks = run_ranks(4, look, mode, False, 6 if mode == "observe" else 2)
    wanted = {"observe": [0, 5], "auto": [0], "on": []}[mode]
    assert [exchanges for exchanges, _ in ranks] == [wanted, wanted, [], []], "first stages"
    if wanted:
        found = ranks[0][1]
        assert found == ranks[1][1]
        assert found.num_ranks == 2
        assert found.tokens == 4 * (PROMPT + ANSWER - 1)
        assert (found.shareable, found.shared) == (2 * 50, 0), "32, 40 and 50 are compared"
        assert (found.repeated, found.slowest) == (2 * 50, 2 * (PROMPT + ANSWER - 1))


def test_groups_that_are_together_are_counted_where_they_are() -> None:
    ranks = run_ranks(4, look, "observe", True, 1)
    assert (ranks[0][1].shareable, ranks[0][1].shared) == (100, 100)


SCATTERED = SharingAcrossRanks(1000, 600, 100, 4, repeated=400, slowest=300, own=100)


def test_the_log_names_the_trainers_option(monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "verl", object())
    with caplog.at_level(logging.INFO):
        tell(SCATTERED, "set across_ranks to auto")
        tell(SCATTERED._replace(shared=590), "set across_ranks to auto")
        tell(SCATTERED, "")
    warning, *information = caplog.records
    assert warning.levelno == logging.WARNING
    assert "600 are shareable, 100 on the ranks where they are" in warning.getMessage()
    assert "scattered over 4 data-parallel ranks" in warning.getMessage()
    assert VERL.together in warning.getMessage()
    assert [one.levelno for one in information] == [logging.INFO] * 2, "shared there, or across"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "executes 300 tokens, and with across_ranks a rank 125 in the mean, at least 2.40x: "),
        ({"own": 200}, "a rank 125 in the mean, at least 1.50x: set across_ranks to auto"),
    ],
)
def test_the_log_says_what_across_ranks_would_bring(caplog, changes, told) -> None:
    tell(SCATTERED._replace(**changes), "set across_ranks to auto")
    assert told in caplog.messages[0]


def test_what_across_ranks_would_bring_is_a_lower_bound() -> None:
    """As trees of all ranks have it; three groups, and a rollout that one rank has alone."""
    dealt = [
        [rollout(group, number, prompt) for group, prompt in enumerate((90, 400, 700))]
        for number in range(4)
    ]
    dealt[2].append(rollout(9, 0, 500))
    options = TreeOptions(min_gain=0)

    def executed(rollouts: list[Pairs]) -> int:
        return build(rollouts, [0] * len(rollouts), options).executed_tokens

    heard = [(sum(map(len, some)), beginnings(some)) for some in dealt]
    found = scattered.counted(heard, 4)
    slowest = max(map(executed, dealt))
    # A code of a position is of its input and label: prompts end a position earlier.
    once = executed([one for some in dealt for one in some])
    assert found.slowest == slowest, "ranks share nothing alone"
    assert once / 4 <= found.mean <= once / 4 + 0.2 * (90 + 400 + 700) * 3 / 4
    own = 3 * ANSWER + 500 + ANSWER - 1
    assert own <= found.own <= own + 0.2 * (90 + 400 + 700)
    assert 1.2 < found.speedup <= slowest / max(once / 4, own)


def test_what_carries_loss_crosses_ranks_too() -> None:
    one = rollout(0, 0)
    trained = Pairs(one.inputs, one.labels, np.ones(len(one), bool))
    found = [scattered.counted([(len(s), beginnings([s]))] * 2, 2) for s in (one, trained)]
    assert found[0] == found[1]
    assert len(one) / scattered.GROWTH - 1 <= found[0].repeated <= len(one)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "set across_ranks to auto"),
        ({"mode": "observe"}, "set across_ranks to auto, and mode, too"),
        ({"crosses": True}, ""),
        ({"why": across_step.SLOWER}, f"not in this step, as {across_step.SLOWER}"),
        (
            {"experts": object(), "gathers_tokens": True},
            f"{ACROSS_EXPERTS.name} is not supported yet",
        ),
        ({"gathers_late": True}, f"{ACROSS_GATHERS.name} is not supported yet"),
    ],
)
def test_the_setting_or_what_is_in_its_way_is_named(changes, told) -> None:
    free = {"experts": None, "gathers_late": False, "looks_ahead": False, "forward_only": True}
    has = {"crosses": False} | free | changes
    rank = SimpleNamespace(data_ranks=object(), siblings=object(), **has)
    config = PrefixConfig(mode=changes.get("mode", "auto"))
    assert across_step.setting(config, rank, changes.get("why", "")) == told  # type: ignore[arg-type]


def test_without_a_common_dp_group_nothing_is_exchanged() -> None:
    watch = scattered.Watch()
    rank = SimpleNamespace(is_first=True, data_ranks=None, forward_only=False)
    watch.look(None, rank, setting="")  # type: ignore[arg-type]
    assert watch.last is None
