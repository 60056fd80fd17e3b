"""Plan files with something changed: run, or refused in one line."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_prefix.features.plan_files.table import to_csv
from megatron_prefix.plan.actions import policies
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.tree import TreeOptions, build
from tests.harness import fuzzing
from tests.harness.jobs import crossing_plan
from tests.harness.trees import flat_rollouts

NUM_CASES = 100


def texts() -> list[str]:
    rollouts, groups = flat_rollouts(9, 4, 3, 2)
    forest = build(rollouts, groups, TreeOptions(min_gain=0, segment_tokens=8, chunk_tokens=4))
    plain = make_plan(forest, 2)
    mixed = replace(plain, policies=policies(plain.segments, "recompute"))
    plans = (
        plain,
        mixed,
        make_plan(forest, 2, num_chunks=2),
        crossing_plan(),
    )
    return [to_csv(plan) for plan in plans]


@pytest.mark.parametrize("number", range(4))
def test_a_changed_plan_is_shown_or_refused_in_one_line(tmp_path, number: int) -> None:
    path, text, bad = tmp_path / "plan.csv", texts()[number], {}
    picture = str(tmp_path / "plan.svg")
    for seed in range(NUM_CASES):
        rng = random.Random(1000 * number + seed)
        path.write_bytes(fuzzing.changed_cells(rng, text))
        bad[seed] = fuzzing.fault("show", str(path), "--svg", picture)
    assert not {seed: fault for seed, fault in bad.items() if fault}
