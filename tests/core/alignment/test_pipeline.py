"""Plan files of the catalogue; all else that pipelines run is in tests/test_cases_on_ranks.py."""

import pytest

from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from tests.harness.pipelines import build_chunks, config_of, rollouts_of
from tests.harness.ranks import run_ranks


def planned(shape, layout):
    """A rank's part: what differs from Megatron's step, and whether anything was shared."""
    runtime.initialize(layout)
    groups, vocab = rollouts_of(shape)
    config = config_of(shape, layout, planned=True)
    verdict = align.over_ranks(align.align(build_chunks(layout, vocab), groups, config))
    return [*verdict.failures], verdict.executed_tokens < verdict.raw_tokens


@pytest.mark.parametrize(
    ("shape", "layout"),
    [("uneven-groups", Layout(pp=4)), ("two-level-tree", Layout(pp=2, vpp=2))],
    ids=["pp4", "pp2-vpp2"],
)
def test_a_plan_file_is_megatrons_step(shape, layout):
    assert run_ranks(layout.world_size, planned, shape, layout) == [([], True)] * layout.world_size
