"""Data-parallel ranks whose routers count together: they share together, and get equally many
rollouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.rl import passes
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.turns

VOCAB = 64
AUX = {"moe_aux_loss_coeff": 1.0}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}


def groups(flat: bool, seed: int) -> list[Group]:
    """Two groups of four uneven rollouts: flat, or with a turn of the agent that two of them share.

    Lengths do not depend on the seed, and rollouts follow one another in an order that is not that
    of the tree.
    """
    draw = np.random.default_rng(seed)
    found = []
    for number in range(2):
        prompt, turn = draw.integers(0, VOCAB - 4, 21), draw.integers(0, VOCAB - 4, 9)
        rollouts = []
        for member in range(4):
            shared = [] if flat or member % 2 else turn
            own = draw.integers(0, VOCAB - 4, 5 + 3 * member)
            ids = np.concatenate([prompt, shared, [VOCAB - 4 + member], own]).astype(np.int32)
            spans = ((len(prompt), len(ids)),)
            rollouts.append(Rollout(f"g{number}", str(member), ids, len(prompt), spans, 0.0))
        found.append(Group(f"g{number}", tuple(rollouts)))
    return found


def test_one_schedule_on_all_data_parallel_ranks():
    """One rank has nothing to share, so neither does the other: their sums would not meet."""

    def on_rank() -> tuple[bool, bool, str, float]:
        runtime.initialize(Layout(dp=2))
        spec = resolve("tiny-moe", **{"num_layers": 1, **GLOBAL}).with_vocab(VOCAB)
        chunks = build_model(spec, layout=Layout(dp=2), dtype="float64")
        number = align.data_rank()
        mine = groups(True, 0)
        if number:  # of other prompts
            others = [groups(True, seed)[0] for seed in range(1, 9)]
            mine = [replace(group, rollouts=group.rollouts[:1]) for group in others]
        ours = PrefixSchedule(PrefixConfig(min_gain=0, mode="auto", min_speedup=1.2))
        items = align.microbatches(mine, 0)
        for item in items if number else ():
            item["loss_mask"][:] = 1.0  # no output may be left out either
        # Without gradients nothing is counted, so ranks need not go together.
        assert len(passes.logprobs(ours, chunks, items[: 3 + number])) == 3 + number
        align.run_step(ours, chunks, items)
        decision = ours.report.decision
        return decision.share, decision.fallback, decision.reason, decision.predicted_speedup

    first, second = run_ranks(2, on_rank)
    assert first[3] > 1.2 > second[3]
    assert not first[0] and not second[0] and first[1] and second[1]
    assert "another data-parallel rank" in first[2]
    assert "share too few first positions" in second[2]


def test_ranks_that_count_together_get_equally_many_rollouts():
    mine = [
        replace(group, rollouts=group.rollouts[: 2 + n]) for n, group in enumerate(groups(True, 0))
    ]
    config, layout = PrefixConfig(mode="on"), Layout(dp=2)
    apart = deal(mine, resolve("tiny-moe", **AUX), layout, config, stock=False)
    assert sorted(sum(len(group.rollouts) for group in rank) for rank in apart) == [2, 3]
    with pytest.raises(UserError, match="5 rollouts"):
        deal(mine, resolve("tiny-moe", **GLOBAL), layout, config, stock=False)
