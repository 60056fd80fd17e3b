"""Rows of the table of cases on several ranks: those of one layout in one job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_prefix.refusals import table
from tests import judge
from tests.cases import FURTHER, Row, auto_row, row, wrong


def stock(model: str, **values: str) -> list[Row]:
    """Steps that do not share: bit for bit Megatron's."""
    no_gain = replace(row(model, "no gain", **values), mode="auto", says="speedup")
    both = replace(row(model, **values), mode="observe"), no_gain
    return [replace(each, expects="fallback") for each in both]


ON_RANKS: dict[str, list[Row]] = {
    "tp2_sp": [
        row("own delta global", "small", recompute="full"),
        *(row(name, "small") for name in ("mla", "mamba", "mtp 2", "experts bias", "experts all")),
        row("gdn", "whole"),
        row("dsa", "packs of chunks"),
        row("gdn and mamba", "small"),
        row("experts both", "joined", returns="per_token"),
        row("gqa", "small", form="thd_padded"),
        row("gpt-oss", "whole", form="thd_padded"),
    ],
    "tp2": [row("own delta global"), row("mtp", "small"), row("gpt-oss")],
    "pp2": [
        auto_row("", False, True, arguments="of another layout"),
        auto_row(table.OTHER_SHAPE.fix, head="shortened", arguments="of another layout"),
        auto_row(table.OTHER_SENT.fix, in_place="on every stage"),
        row("own delta on stages", "recompute chunks"),
        *(row("gqa", options) for options in ("chunks of 7", "budget", "auto chunks")),
        row("gqa", "small", returns="per_token", scale="constant"),
        row("gqa", "a layer on the host", returns="two", loss="sequence"),
        row("tied, norms", "recompute", recompute="full"),
        row("outputs freed", "offload"),
        row("equal lengths", "small", lengths="equal", tree="groups"),
        *(row(name, "small") for name in ("mla", "gpt-oss", "mtp", "experts all")),
        row("mtp 3 mla", "chunks of 7", **FURTHER),
        row("dsa", "packs of chunks"),
        row("qk_norm", "small", form="thd", labels="absent", in_place="div"),
        row("qk_norm", "small", form="thd", seed=1),  # whose data are on all stages
        row("qk_norm", "small", form="rows"),
        row("gqa", "small", labels="absent", session="evaluate"),
        *stock("gqa", form="thd"),
        *(row("gdn", options, recompute="selective")
          for options in ("recompute chunks", "all on the host")),
        row("mamba", "offload"),
    ],
    "pp4": [
        row("gqa", "small"),
        row("tied", "recompute", recompute="full", returns="per_token", scale="constant"),
    ],
    "pp2_vpp2": [
        *stock("gqa"),
        row("mtp 5", "small", **FURTHER),
        row("gqa", "small", returns="per_token", scale="constant"),
        row("gpt-oss", "chunks of 7", recompute="full"),
        row("gdn", "small", recompute="full"),
        *(row(name, "small") for name in ("experts both", "experts global", "dsa")),
        row("turns of three", "small"),
        row("mamba in virtual stages", "small"),
        row("gdn and mamba", "small", recompute="full"),
        row("mtp", "recompute"),
    ],
    "pp3_vpp2": [row("gqa", "all on the host", recompute="full")],
    "cp2": [
        row("qk_norm", "small", form="rows"),
        row("mtp 5", "whole", **{**FURTHER, "form": "thd", "tree": "groups"}),
        *(row("gpt-oss", options) for options in ("wave recompute", "offload")),
        row("gpt-oss", "small", recompute="full"),
        *(row("gqa", options) for options in ("segment", "wave recompute", "budget")),
        *(row("gqa", options, form="thd_padded")
          for options in ("small", "wave", "segment recompute", "offload")),
        row("gqa", "joined", "joined"),
        row("mla", "small", form="thd_padded"),
        row("gqa", "small", returns="two", scale="constant"),
        row("gqa", "small", labels="absent", returns="per_token"),
        row("mamba", "wave", recompute="selective"),
        row("mamba", "segment recompute"),
        row("mtp", "small", form="thd"),
        row("mtp", "chunks of 7", recompute="full", tree="groups", returns="per_token"),
        row("gdn with CP", "small"),
        row("gdn and mamba", "small"),
        row("gemma", "segment"),
        row("windows last", "wave"),
        row("experts both", "small", form="thd_padded"),
        row("experts bias", "small", returns="per_token"),
    ],
    "dp2": [
        row("own delta attribute", "small"),
        *(row(name, "small") for name in ("dsa", "gdn", "mtp", "experts global")),
        row("experts all", "joined", returns="per_token"),
        row("gqa", "small", ddp="overlapped", recompute="selective"),
    ],
    "ep2": [
        *(row(name, "small") for name in (
            "experts bias", "experts global", "experts all-gather", "mamba experts",
            "gpt-oss experts", "mtp experts", "dsa experts")),
        row("experts both", "joined", "joined"),
        row("experts both", "small", form="thd_padded"),
        row("experts seq", "small", form="rows"),
        row("mla experts", "whole", form="thd"),
        row("experts both", "small", ddp="overlapped"),
    ],
    "tp2_pp2": [row("gqa", "recompute", recompute="full"), row("tied, norms", "offload")],
    "cp2_pp2": [
        row("gpt-oss", "small"), row("mamba", "small"), row("gqa", "segment recompute"),
    ],
    "tp2_cp2": [row("experts both", "small"), row("gpt-oss", "small")],
    "cp2_dp2": [row("gqa", "segment")],
    "cp2_ep2": [
        row("experts both", "joined", "joined"), row("mtp experts", "small", form="thd"),
    ],
    "cp4": [row("gqa", "segment", form="thd_padded"), row("gemma", "wave")],
    "pp2_dp2": [row("experts all", "recompute", ddp="overlapped")],
    "pp2_ep2": [
        row("experts both", "small", recompute="full"),
        row("gdn experts", "small"),
        row("mtp experts", "whole", recompute="full"),
    ],
    "tp2_ep2": [row("experts both", "small", recompute="full")],
    "cp2_ep4": [row("experts both", "small")],
    "tp2_cp2_ep2_pp2": [row("mla experts", "small")],
}  # fmt: skip


@pytest.mark.parametrize("layout", ON_RANKS)
def test_ranks_make_the_stock_schedules_step(layout: str) -> None:
    judge.check(layout, ON_RANKS[layout])


CROSSED = {"tree": "on_all_ranks"}
WRONG: dict[str, list[Row]] = {
    "tp2_sp": [wrong("rows for tokens", "gradient auxiliary", "experts both", returns="per_token")],
    "pp2": [wrong("rows for tokens", "gradient auxiliary", "experts both")],
    "cp2": [
        *(wrong(mistake, "gradient", "gpt-oss") for mistake in (
            "last rows of this rank", "gradients of this rank", "no gradient to ancestors",
            "pieces turned", "keys as gathered")),
        wrong("the other rank's share", "gradient", "mtp", form="thd"),
    ],
    "dp2": [
        wrong("no last backward", "gradient", "gqa"),
        wrong("counts of a rank", "gradient auxiliary", "experts global"),
        *(
            wrong("no counts for other ranks", kinds, name, "across_ranks", **CROSSED)
            for name, kinds in (
                ("experts global", "gradient auxiliary"), ("experts both", "gradient auxiliary"),
                ("experts bias alone", "state"),
            )
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", WRONG)
def test_a_mistake_shows(layout: str) -> None:
    judge.check(layout, WRONG[layout])
