"""Chunk lengths that are chosen: short steps, quickly, and the same answer for the same shape."""

from unittest import mock

import pytest

from megatron_prefix.features.chunk_lengths import chooser as chunk_lengths
from megatron_prefix.features.chunk_lengths.chooser import TOKENS, ChunkChooser
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.plan.walk import token_cost
from megatron_prefix.tree import TreeOptions, find_shared
from tests.harness.trees import flat_rollouts


@pytest.mark.parametrize(("p", "r", "n", "stages", "wave", "chunks"), [
    (10240, 2048, 8, 8, 2048, 1), (16384, 64, 16, 4, 1024, 1), (10240, 2048, 8, 4, 2048, 2),
    (2048, 1024, 8, 2, 2048, 1),
])  # fmt: skip
def test_auto_is_within_five_percent_of_a_sweep(p, r, n, stages, wave, chunks):
    rollouts, groups = flat_rollouts(p, r, n, 4)
    shared = find_shared(rollouts, groups, TreeOptions(segment_tokens=wave))
    sweep = (0, *range(p // 10, p + 1, p // 10))
    plans = {n: best_plan(shared.forest(n), stages, num_chunks=chunks) for n in sweep}
    chooser = ChunkChooser(stages, num_chunks=chunks)
    chosen = chooser.choose(rollouts, groups, TreeOptions(segment_tokens=wave))
    found = best_plan(shared.forest(chosen), stages, num_chunks=chunks)

    def makespan(plan, cost):
        return simulate(plan, cost=cost).makespan

    for cost in (token_cost, TOKENS.segment):
        best = min(makespan(plan, cost) for plan in plans.values())
        assert makespan(found, cost) <= 1.05 * best
        assert makespan(found, cost) <= makespan(plans[0], cost)


def test_auto_cuts_nothing_where_nothing_waits():
    rollouts, groups = flat_rollouts(1000, 100, 4, 2)
    assert ChunkChooser(1).choose(rollouts, groups, TreeOptions()) == 0
    assert ChunkChooser(4).choose([], [], TreeOptions()) == 0
    assert ChunkChooser(4).choose(*flat_rollouts(100, 20, 4, 2), TreeOptions()) == 0


def test_a_shape_is_searched_once(monkeypatch):
    planned = mock.Mock(wraps=chunk_lengths.best_plan)
    monkeypatch.setattr(chunk_lengths, "best_plan", planned)
    chooser = ChunkChooser(4)

    def chosen(*step):
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
