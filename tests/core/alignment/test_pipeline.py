"""Pipelines: the same step as Megatron's schedule, on several ranks in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.plans.forest import num_trees, trees
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.tree import build
from tests.harness.pipelines import SHAPES, Case, rollouts_of, run_cases
from tests.harness.ranks import run_ranks
from tests.harness.rows import chosen, rows
from tests.harness.steps import Contract
from tests.harness.stock_once import stock_once

pytestmark = pytest.mark.turns

LAYOUTS = {
    "pp2": Layout(pp=2),
    "pp4": Layout(pp=4),
    "pp2-vpp2": Layout(pp=2, vpp=2),
    "pp3-vpp2": Layout(pp=3, vpp=2),
    "tp2-pp2": Layout(tp=2, pp=2, sequence_parallel=True),
}
FREED = {"deallocate_pipeline_outputs": True}
WITHOUT_MORE = ("flat-group", "chunked-prefix", "small-groups")
"""Shapes that `pp4` and `pp2-vpp2` have without options."""
CASES = {
    "pp2": {
        **{shape: Case(shape) for shape in SHAPES},
        **{f"{shape}, plan file": Case(shape, planned=True) for shape in ("two-level-tree",)},
        "outputs freed": Case("two-level-tree", overrides=FREED),
        "tied": Case("several-groups", "tiny-qwen3"),
        "tied, freed, recomputed": Case(
            "two-level-tree", "tiny-qwen3", recompute="full", overrides=FREED
        ),
        "selective": Case("flat-group", recompute="selective"),
        "memory auto": Case(
            "several-groups", prefix={"memory": "auto", "memory_budget_gb": 1e-4}, overrides=FREED
        ),
        "memory offload": Case("two-level-tree", prefix={"memory": "offload"}, overrides=FREED),
        "memory recompute": Case("uneven-groups", prefix={"memory": "recompute"}, overrides=FREED),
        "sidecar on the host": Case("chunked-prefix", prefix={"cache_host_layers": 1}),
        "chunks auto": Case("chunked-prefix", prefix={"chunk_tokens": "auto"}),
        "equal lengths": Case("several-groups", overrides={"variable_seq_lengths": False}),
        "per token": Case("two-level-tree", contract=Contract(per_token=True)),
        "scaled": Case("uneven-groups", contract=Contract(scale=8.0)),
        "pairs": Case(
            "two-level-tree", contract=Contract(triple=False, scale=0.5), overrides=FREED
        ),
        "over sequences": Case("uneven-groups", contract=Contract(sequence_level=True)),
    },
    "pp4": {
        **{shape: Case(shape) for shape in WITHOUT_MORE},
        "plan file": Case("uneven-groups", planned=True),
        "tied, freed": Case("two-level-tree", "tiny-qwen3", overrides=FREED),
        "recomputed": Case("uneven-groups", recompute="full"),
        "per token, scaled": Case("several-groups", contract=Contract(per_token=True, scale=8.0)),
    },
    "pp2-vpp2": {
        **{shape: Case(shape) for shape in WITHOUT_MORE},
        "plan file": Case("two-level-tree", planned=True),
        # No FREED here: with interleaving Megatron frees an output whose message may still be on
        # its way (megatron/core/pipeline_parallel/schedules.py), so with gloo the stock schedule
        # now and then computes something else.
        "tied": Case("two-level-tree", "tiny-qwen3"),
        "recomputed": Case("several-groups", recompute="full"),
        "per token, scaled": Case("uneven-groups", contract=Contract(per_token=True, scale=8.0)),
        "turns of three": Case(
            "several-groups", overrides={"microbatch_group_size_per_vp_stage": 3}
        ),
    },
    "pp3-vpp2": {
        "memory offload": Case("several-groups", recompute="full", prefix={"memory": "offload"}),
        "sidecar on the host": Case(
            "two-level-tree", prefix={"cache_host_layers": 1, "memory": "recompute"}
        ),
    },
    "tp2-pp2": {
        "small-groups": Case("small-groups"),
        "tree, all in a few segments": Case("two-level-tree", prefix={"segment_tokens": 240}),
        "recomputed": Case("small-groups", "tiny-qwen3", recompute="full", overrides=FREED),
        "memory offload": Case("small-groups", prefix={"memory": "offload"}),
    },
}


@pytest.mark.parametrize(("shape", "budget"), [("small-groups", None), ("two-level-tree", 240)])
@pytest.mark.parametrize("align", [1, 2])
def test_segments_of_several_trees_are_among_the_cases(
    shape: str, budget: int | None, align: int
) -> None:
    """Prompts, turns of agents with loss, and waves, beside those of other groups."""
    options = replace(SHAPES[shape].options, multiple=align)
    options = replace(options, segment_tokens=budget or options.segment_tokens)
    forest = build(*pairs_of_groups(rollouts_of(shape)[0]), options)
    together = [len({*numbers}) for numbers in trees(forest.segments)]
    inner = [n for n, segment in zip(together, forest.segments, strict=True) if segment.inner]
    waves = [n for n, segment in zip(together, forest.segments, strict=True) if not segment.inner]
    assert max(inner) > 1 and max(waves) > 1
    assert num_trees(forest.segments) == len(SHAPES[shape].groups)
    if shape == "two-level-tree":
        assert (
            max(n for n, s in zip(together, forest.segments, strict=True) if s.inner and s.scored)
            > 1
        )
        assert any(len(segment.parents) > 1 for segment in forest.segments)


PRODUCTS = {
    *(
        ("pp2", case)
        for case in (
            "outputs freed",
            "tied",
            "memory offload",
            "scaled",
            "two-level-tree, plan file",
        )
    ),
    *(("pp4", case) for case in ("plan file", "tied, freed", "recomputed", "per token, scaled")),
    *(("pp4", case) for case in ("flat-group", "chunked-prefix")),
    *(("pp2-vpp2", case) for case in ("flat-group", "recomputed", "per token, scaled")),
    ("pp3-vpp2", "sidecar on the host"),
    *(("tp2-pp2", case) for case in ("small-groups", "recomputed", "memory offload")),
}
"""Their options and layouts stand in other rows."""


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest) -> Callable[[str], list[dict[str, str]]]:
    """What every rank says of the cases of a layout."""
    every = chosen(request, "layout", "case")

    @functools.cache
    def of(layout: str) -> list[dict[str, str]]:
        made = LAYOUTS[layout]
        cases = {name: CASES[layout][name] for place, name in every if place == layout}
        return run_ranks(made.world_size, stock_once()(run_cases), made, cases, timeout_s=900)

    return of


@pytest.mark.parametrize(
    ("layout", "case"),
    rows([(layout, case) for layout, cases in CASES.items() for case in cases], PRODUCTS),
)
def test_a_step_is_megatrons(
    layout: str, case: str, outcome: Callable[[str], list[dict[str, str]]]
) -> None:
    for rank, found in enumerate(outcome(layout)):
        assert not found[case], f"rank {rank}: {found[case]}"
