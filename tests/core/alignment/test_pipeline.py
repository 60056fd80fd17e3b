"""Pipelines: the same step as Megatron's schedule, on several ranks in fp64."""

from __future__ import annotations

import pytest

from megatron_prefix.lab.runtime import Layout
from tests.harness.pipelines import Case, run_cases
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.turns

LAYOUTS = {
    "pp2": Layout(pp=2),
    "pp4": Layout(pp=4),
    "pp2-vpp2": Layout(pp=2, vpp=2),
    "pp3-vpp2": Layout(pp=3, vpp=2),
    "tp2-pp2": Layout(tp=2, pp=2, sequence_parallel=True),
}
CASES = {
    "pp2": {"two-level-tree": Case("two-level-tree", planned=True)},
    "pp4": {"uneven-groups": Case("uneven-groups", planned=True)},
    "pp2-vpp2": {"two-level-tree": Case("two-level-tree", planned=True)},
}
"""Plan files of the catalogue; all else that pipelines run is in tests/test_cases_on_ranks.py."""


@pytest.mark.parametrize("layout", CASES)
def test_a_plan_file_is_megatrons_step(layout: str) -> None:
    made = LAYOUTS[layout]
    for rank, found in enumerate(run_ranks(made.world_size, run_cases, made, CASES[layout])):
        assert not any(found.values()), f"rank {rank}: {found}"
