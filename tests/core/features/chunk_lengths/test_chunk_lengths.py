"""Chunk lengths that are chosen: short steps, quickly, and the same answer for the same shape."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest

from megatron_prefix.features.chunk_lengths import chooser as chunk_lengths
from megatron_prefix.features.chunk_lengths.chooser import TOKENS, ChunkChooser
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.plan.walk import Cost, token_cost
from megatron_prefix.tree import Pairs, TreeOptions, find_shared
from tests.harness.trees import flat_rollouts


@pytest.mark.parametrize(
    ("p", "r", "n", "stages", "wave", "chunks"),
    [
        (10240, 2048, 8, 8, 2048, 1),
        (16384, 64, 16, 4, 1024, 1),
        (10240, 2048, 8, 4, 2048, 2),
        (2048, 1024, 8, 2, 2048, 1),
    ],
)
def test_auto_is_within_five_percent_of_a_sweep(p, r, n, stages, wave, chunks) -> None:
    rollouts, groups = flat_rollouts(p, r, n, 4)
    shared = find_shared(rollouts, groups, TreeOptions(segment_tokens=wave))
    sweep = (0, *range(p // 10, p + 1, p // 10))
    plans = {n: best_plan(shared.forest(n), stages, num_chunks=chunks) for n in sweep}
    chooser = ChunkChooser(stages, num_chunks=chunks)
    chosen = chooser.choose(rollouts, groups, TreeOptions(segment_tokens=wave))
    found = best_plan(shared.forest(chosen), stages, num_chunks=chunks)

    def makespan(plan, cost: Cost) -> float:
        return simulate(plan, cost=cost).makespan

    for cost in (token_cost, TOKENS.segment):
        best = min(makespan(plan, cost) for plan in plans.values())
        assert makespan(found, cost) <= 1.05 * best
        assert makespan(found, cost) <= makespan(plans[0], cost)


@pytest.mark.parametrize("seed", range(4))
def test_auto_is_within_five_percent_on_uneven_trees(seed) -> None:
    """A sweep of every multiple of 256, prompts that branch once more, one to three groups."""
    rng = random.Random(seed)
    rollouts, groups = [], []
    for group in range(rng.randint(1, 3)):
        prompt = np.arange(rng.choice((1024, 3000, 8192))) + (group << 15)
        turn = np.arange(len(prompt) // 4) + (1 << 20) + (group << 15)
        for number in range(rng.randint(2, 8)):
            answer = np.arange(rng.randint(64, 1024)) + (2 + len(rollouts) << 21)
            tokens = np.concatenate([prompt, turn, answer][:: 1 + number % 2])
            trained = np.arange(len(tokens) - 1) >= len(prompt)
            rollouts.append(Pairs(tokens[:-1], tokens[1:], trained))
            groups.append(group)
    options = TreeOptions(segment_tokens=rng.choice((512, 1024, 2048)))
    stages, chunks = rng.choice(((2, 1), (4, 1), (4, 2), (8, 1)))
    shared = find_shared(rollouts, groups, options)

    def makespan(chunk_tokens: int) -> float:
        plan = best_plan(shared.forest(chunk_tokens), stages, num_chunks=chunks)
        return simulate(plan, cost=TOKENS.segment).makespan

    best = min(map(makespan, range(0, max(map(len, rollouts)), 256)))
    chosen = ChunkChooser(stages, num_chunks=chunks).choose(rollouts, groups, options)
    assert makespan(chosen) <= 1.05 * best < makespan(0)


def test_auto_cuts_nothing_where_nothing_waits() -> None:
    rollouts, groups = flat_rollouts(1000, 100, 4, 2)
    assert ChunkChooser(1).choose(rollouts, groups, TreeOptions()) == 0
    assert ChunkChooser(4).choose([], [], TreeOptions()) == 0
    assert ChunkChooser(4).choose(*flat_rollouts(100, 20, 4, 2), TreeOptions()) == 0


def test_a_shape_is_searched_once(monkeypatch) -> None:
    planned = mock.Mock(wraps=chunk_lengths.best_plan)
    monkeypatch.setattr(chunk_lengths, "best_plan", planned)
    chooser = ChunkChooser(4)

    def chosen(*step) -> tuple[int, bool]:
        """The answer, and whether it was searched."""
        planned.reset_mock()
        return chooser.choose(*step), planned.called

    steps = [(*flat_rollouts(1024, prompt, 4, 2), TreeOptions()) for prompt in (256, 128, 64)]
    first, again, third = (chosen(*steps[0]) for _ in range(3))
    assert first[1] and again == third == (first[0], False)
    others = [r // 2 for r in range(len(steps[0][0]))]
    renumbered = [1000 - number for number in others]
    assert chosen(*steps[0], others)[1] and not chosen(*steps[0], renumbered)[1]
    assert chosen(*steps[1])[1]
    assert not chosen(*steps[0])[1]
    monkeypatch.setattr(chunk_lengths, "MOST_KNOWN", 3)
    assert chosen(*steps[2]) == (ChunkChooser(4).choose(*steps[2]), True)
    assert chosen(*steps[0]) == first, "forgotten with the others"


def test_align_is_kept() -> None:
    """Where a shorter chunk would be chosen without it, and chunks pay all the same."""
    rollouts, groups = flat_rollouts(3000, 300, 4, 2)
    chosen = [
        ChunkChooser(4).choose(rollouts, groups, TreeOptions(multiple=align, segment_tokens=1000))
        for align in (1, 1000)
    ]
    assert 0 < chosen[0] < 1000 <= chosen[1]
