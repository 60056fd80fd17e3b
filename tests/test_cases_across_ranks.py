"""Rows of the table of cases whose prompts cross data-parallel ranks: those of one layout in one
job; and random trees that are dealt to ranks at random."""

from __future__ import annotations

import pytest

from tests import judge
from tests.cases import Row, random_row, row

CROSSED = {"tree": "on_all_ranks"}
ACROSS: dict[str, list[Row]] = {
    "cp2_dp2_ep2": [row("experts both", "across whole", "crossed", **CROSSED)],
    "tp2_pp2_dp2": [row("gqa", "across_ranks", "crossed", **CROSSED)],
    "dp2": [
        *(
            row(name, options, "crossed", ddp="overlapped", **CROSSED)
            for name, options in (
                ("gqa", "across_ranks"),
                ("gqa", "across whole"),
                ("gqa", "across recompute"),
                ("gpt-oss", "across_ranks"),
                ("mla", "across whole"),
                ("mtp", "across_ranks"),
                ("gdn", "across whole"),
                ("mamba", "across_ranks"),
                ("dsa", "across_ranks"),
                ("dsa experts", "across_ranks"),
            )
        ),
        *(
            row(name, "across_ranks", "crossed", returns="per_token", **CROSSED)
            for name in (
                "experts both",
                "experts bias",
                "experts bias alone",
                "experts global",
                "experts all",
            )
        ),
        row("experts both", "across whole", "crossed", recompute="full", **CROSSED),
    ],
    "dp3": [
        row("gqa", "across whole", "crossed", **CROSSED),
        row("mtp", "across_ranks", "crossed", **CROSSED),
        row("experts behind a dense layer", "across_ranks", "crossed", **CROSSED),
        row("experts all", "across_ranks", "crossed", returns="per_token", **CROSSED),
    ],
    "tp2_dp2": [
        row("gqa", "across_ranks", "crossed", **CROSSED),
        row("mtp", "across whole", "crossed", **CROSSED),
        row("mtp 2", "across_ranks", "crossed", **CROSSED),
        row("experts both", "across whole", "crossed", returns="per_token", **CROSSED),
    ],
    "pp2_dp2": [
        row("gqa", "across recompute", "crossed", **CROSSED),
        row("mtp", "across_ranks", "crossed", **CROSSED),
        row("experts all", "across recompute", "crossed", **CROSSED),
    ],
    "pp2_vpp2_dp2": [
        row("gqa", "across_ranks", "crossed", **CROSSED),
        row("experts global", "across whole", "crossed", **CROSSED),
    ],
    "cp2_dp2": [
        row("gpt-oss", "across_ranks", "crossed", **CROSSED),
        row("gqa", "across_ranks", "crossed", **CROSSED),
        row("experts both", "across whole", "crossed", **CROSSED),
    ],
    "ep2": [
        row("experts both", "across_ranks", "crossed", returns="per_token", **CROSSED),
        row("experts bias", "across whole", "crossed", **CROSSED),
        row("mtp experts", "across_ranks", "crossed", **CROSSED),
    ],
    "pp2_ep2": [row("experts both", "across recompute", "crossed", **CROSSED)],
    "dp4_ep2": [
        row("experts both", "across whole", "crossed", recompute="full", **CROSSED),
        row("experts global", "across_ranks", "crossed", **CROSSED),
    ],
}


@pytest.mark.parametrize("layout", ACROSS)
def test_prompts_run_once_in_the_job(layout: str) -> None:
    judge.check(layout, ACROSS[layout])


RANDOM: dict[str, tuple[str, ...]] = {
    "dp2": ("gqa", "experts both", "experts global", "gdn"), "dp3": ("gqa", "mtp"),
    "pp2_dp2": ("gqa", "experts global", "mtp"), "pp2_vpp2_dp2": ("gqa",), "cp2_dp2": ("gqa",),
    "tp2_dp2": ("gqa", "mtp"), "ep2": ("experts both", "experts global", "mtp experts"),
    "dp4_ep2": ("experts both",), "pp2_ep2": ("experts global",),
}  # fmt: skip
"""Models whose batches of random trees are dealt to ranks at random."""


@pytest.mark.parametrize("layout", RANDOM)
def test_random_trees_on_all_ranks(layout: str) -> None:
    judge.check(layout, [
        random_row(model, seed, tree="dealt", options=options, layout=layout)
        for model in RANDOM[layout]
        for seed, options in enumerate(("across_ranks", "across whole", "across recompute"))
    ])  # fmt: skip
