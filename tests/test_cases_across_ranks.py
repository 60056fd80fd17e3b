"""Rows of the table of cases whose prompts cross data-parallel ranks: those of one layout in one
job; and random trees that are dealt to ranks at random."""

import functools
from dataclasses import replace

import pytest

from tests import judge
from tests.cases import Row, random_row, row
from tests.harness.fuzzing import rounds

crossed = functools.partial(row, tree="on_all_ranks")
ACROSS: dict[str, list[Row]] = {
    "dp2": [
        *(
            crossed(name, options, "crossed", ddp="overlapped")
            for name, options in (
                ("gqa", "across recompute"), ("gpt-oss", "across_ranks"),
                ("mla", "across whole"), ("mtp", "across_ranks"), ("gdn", "across whole"),
                ("mamba", "across_ranks"), ("dsa experts", "across_ranks"),
                ("own delta attribute", "across_ranks"),
            )
        ),
        *(
            crossed(name, "across_ranks", "crossed", returns="per_token")
            for name in ("experts bias alone", "experts all")
        ),
        crossed("experts both", "across whole", "crossed", recompute="full"),
        *(crossed(name, "across_ranks", "crossed") for name in ("replay", "replay asked")),
        crossed("qk_norm", "across_ranks", "crossed", form="thd", loss_mask="tails"),
        crossed("experts both", "across_ranks", "crossed", scale="by_microbatch",
                returns="per_token"),
        *(crossed(name, "across_ranks", "crossed")
          for name in ("adapted", "adapted first", "adapted last")),
    ],
    "dp3": [
        replace(crossed("gqa", "across_ranks", "crossed", session="evaluate_then_train"),
                shares=(True, True, False, True)),
        replace(crossed("gqa", "across_ranks", tree="idle"), is_random=True),
        crossed("gqa", "across whole", "crossed"),
        crossed("experts all", "across_ranks", "crossed", returns="per_token"),
    ],
    "tp2_dp2": [
        crossed("mtp 2", "across_ranks", "crossed"),
        crossed("experts both", "across whole", "crossed", returns="per_token"),
    ],
    "pp2_dp2": [
        crossed("mtp", "across_ranks", "crossed"),
        crossed("experts all", "across recompute", "crossed"),
    ],
    "pp2_vpp2_dp2": [crossed("experts global", "across_ranks", "crossed")],
    "cp2_dp2": [
        crossed("gpt-oss", "across_ranks", "crossed"),
        crossed("own sparse sharing", "across_ranks", "crossed", form="thd_parts", seed=1),
        crossed("experts both", "across whole", "crossed"),
    ],
    "ep2": [
        crossed("experts both", "across_ranks", "crossed", returns="per_token"),
        crossed("mtp experts", "across_ranks", "crossed"),
    ],
    "pp2_ep2": [crossed("experts both", "across recompute", "crossed")],
    "dp4_ep2": [crossed("experts global", "across_ranks", "crossed", recompute="full")],
}  # fmt: skip


@pytest.mark.parametrize("layout", ACROSS)
def test_prompts_run_once_in_the_job(layout):
    judge.check(layout, ACROSS[layout])


RANDOM: dict[str, tuple[str, ...]] = {
    "dp2": ("gqa", "experts global", "gdn"), "dp3": ("mtp",), "pp2_dp2": ("experts global",),
    "pp2_vpp2_dp2": ("gqa",), "cp2_dp2": ("gqa",), "tp2_dp2": ("mtp",),
    "ep2": ("experts both", "mtp experts"),
}  # fmt: skip
"""Models whose batches of random trees are dealt to ranks at random."""
OPTIONS = ("across_ranks", "across whole", "across recompute")


@pytest.mark.parametrize("layout", RANDOM)
def test_random_trees_on_all_ranks(layout):
    """Options in turn: of all models together; HYPOTHESIS_PROFILE=search tries each."""
    judge.check(layout, [
        random_row(model, seed, tree="dealt", options=OPTIONS[(number + seed) % 3], layout=layout)
        for number, model in enumerate(RANDOM[layout])
        for seed in range(rounds(1, 30))
    ])  # fmt: skip
