"""Rows of the table of cases on several ranks: those of one layout in one job."""

from dataclasses import replace

import pytest

from megatron_prefix.refusals import table
from tests import cases, judge
from tests.cases import FURTHER, Row, auto_row, wrong


def row(model, options="whole", *ran, **values):
    """In few microbatches: two of four rollouts each, as rows or packs."""
    form = "thd" if model.startswith("own") else "rows"
    return cases.row(model, options, *ran, **{"form": form, **values})


UNSHARED = [
    replace(row("gqa"), mode="observe", expects="fallback"),
    replace(row("gqa", "no gain"), mode="auto", expects="fallback", says="speedup"),
]
"""Steps that do not share: bit for bit Megatron's."""
SCALED = {"scale": "by_microbatch", "returns": "per_token"}
UNLIKE = {"tree": "unlike", "options": "gain of 2"}
"""Only the last data-parallel rank would gain so much, as little of its rollouts is trained; so no
rank shares where they reduce or count together."""


def refused(says, each):
    """By name; rows behind it would meet ranks at different places."""
    return replace(each, expects="refused", says=says)


def graphs(model, options="graphs", **values):
    """Layers on CUDA graphs, that the CPU emulates; a second step has its graphs from the first."""
    small = {"tree": "groups", "session": "train", "form": "rows"}
    return row(model, options, **{**small, **values})


UNDONE = (False, True, True, False, False, False)
"""What a trainer does from its fourth step on is met while that runs, on all ranks."""


def undone(refusal, late, **values):
    return auto_row(refusal.fix, *UNDONE, late=late, **values)


ON_RANKS: dict[str, list[Row]] = {
    "tp2_sp": [
        *(graphs(name) for name in ("gqa", "mla", "experts shared")),
        row("gqa", "small", form="one", calls="reference_before"),
        graphs("gdn", "graphs in chunks"),
        row("own delta global", "small", recompute="full"),
        *(row(name, "small") for name in ("mla marked", "mamba", "mtp 2", "experts bias")),
        *(row(f"dsa{loss}", "packs of chunks") for loss in ("", " sparse loss")),
        row("own sparse sharing", "small", recompute="full"), row("kimi", "small", form="one"),
        row("streams", "small"), row("experts both", "joined", returns="per_token"),
        row("gpt-oss", "whole", form="thd_padded"),
        row("mtp experts", "small", form="one", **SCALED),
        row("gdn in packs", "small", form="thd_padded"),
        row("qk_norm", "small", "ends left out", form="thd_padded", loss_mask="tails"),
        row("replay", "small", form="thd_padded"),
        *(row(f"replay {name}", "recompute chunks", recompute="full")
          for name in ("asked", "slime")),
    ],
    "tp2": [
        *(row(name) for name in ("own delta global", "gpt-oss", "adapted")),
        row("qk_norm", "small", form="thd", batch="of tp rank 0"),
    ],
    "pp2": [
        graphs("mamba", "graphs in chunks"),
        undone(table.TWO_CALLS, "second_call"),
        undone(table.STRAY_GRADIENT, "outside_mask"),
        auto_row("", False, True, arguments="of another layout"),
        auto_row(table.OTHER_SHAPE.fix, head="shortened", arguments="of another layout"),
        auto_row(table.OTHER_SENT.fix, in_place="on every stage"),
        row("own delta on stages", "recompute chunks"),
        row("kimi", "recompute chunks", form="one", recompute="full"),
        *(row("gqa", options, form="one") for options in ("budget", "auto chunks")),
        row("gqa", "a layer on the host", returns="two", loss="sequence"),
        row("tied, norms", "recompute", recompute="full"),
        row("a stage without layers", "small"),
        row("outputs freed", "offload"),
        row("equal lengths", "small", lengths="equal", tree="groups"),
        *(row(name, "small") for name in ("mla", "gpt-oss", "mtp", "experts all")),
        *(row(f"dsa{loss}", "packs of chunks") for loss in ("", " dense loss")),
        row("own sparse sharing", "recompute chunks"),
        row("qk_norm", "small", form="thd", labels="absent", in_place="div"),
        row("qk_norm", "small", form="thd", seed=1),  # whose data are on all stages
        row("gqa", "small", labels="absent", session="evaluate"), *UNSHARED,
        row("gdn", "all on the host", recompute="selective"),
        row("gdn in packs", "small", form="thd"), row("mamba", "offload"), row("adapted", "small"),
        row("mtp experts", "small", form="one", **SCALED),
        row("experts both", "small", form="one", scale="calls"),
        *(row(name, "recompute chunks") for name in ("replay", "replay asked")),
        row("replay miles", "recompute chunks", form="one", recompute="full"),
    ],
    "pp4": [
        row("tied", "recompute", recompute="full", returns="per_token", scale="constant"),
        row("gqa", "whole", scale="by_microbatch"),  # all microbatches in one round
    ],
    "pp2_vpp2": [
        graphs("gqa", "graphs in chunks"), UNSHARED[1], row("mtp 5", "small", **FURTHER),
        row("gqa", "small", returns="per_token", scale="constant"),
        row("gpt-oss", "chunks of 7", recompute="full"), row("gdn", "small", recompute="full"),
        *(row(name, "small") for name in ("experts global", "dsa")),
        row("turns of three", "small", form="one"),
        row("qk_norm", "small", "ends left out", form="thd", loss_mask="tails"),
        row("mamba in virtual stages", "small"),
        refused(table.SCALES_INTERLEAVED.name, row("experts both", "small", form="one", **SCALED)),
    ],
    "pp3_vpp2": [row("gqa", "all on the host", recompute="full")],
    "cp2": [
        graphs("mla experts"),
        row("mtp 5", "whole", **{**FURTHER, "form": "thd", "tree": "groups"}),
        *(row("gpt-oss", options) for options in ("wave recompute", "offload")),
        *(row("gqa", options, form="one") for options in ("segment", "budget")),
        row("gqa", "segment recompute", form="thd_padded"), row("gqa", "joined", "joined"),
        row("mla", "small", form="thd_padded"), row("mamba", "wave", recompute="selective"),
        row("mtp", "small", form="thd"), row("gdn with CP", "small"),
        row("gdn in packs", "small", form="thd_padded"),
        *(row("own delta attribute", options) for options in ("joined", "offload")),
        row("own delta attribute", "recompute chunks", recompute="full"),
        *(row("own sparse sharing", options, form="thd_parts", **values)
          for options, values in (("joined", {}), ("chunks of 2", {"recompute": "full"}),
                                  ("offload", {"labels": "absent"}))),
        row("own sparse experts", "small", form="thd_parts", returns="per_token"),
        row("own delta alone", "chunks of 2", recompute="selective"),
        row("own delta mtp", "small", labels="absent"),
        *(row(name, "small", form="one") for name in ("kimi", "streams")),
        row("windows last", "wave"),
        *(row("qk_norm", "small", "ends left out", loss_mask=mask, form=form)
          for mask, form in (("tails", "rows"), ("tails of rank 0", "thd_padded"))),
        row("experts bias", "small", form="one", returns="per_token"),
        row("experts both", "small", form="one", **SCALED),
        *(row(name, "small") for name in ("replay", "replay asked")),
    ],
    "dp2": [
        graphs("gqa", "graphs recompute", ddp="overlapped"),
        undone(table.TWO_CALLS, "second_call", ddp="overlapped"),
        row("mtp", "small"),
        row("experts all", "joined", returns="per_token"),
        row("gqa", "small", ddp="overlapped", recompute="selective"),
        # Whose reductions are ready by the number of microbatches, which stays the same.
        auto_row("", False, True, ddp="overlapped without no_sync", tree="lengths"),
        row("adapted", "small", ddp="overlapped", session="train"),
        row("dsa sparse loss", "small", ddp="overlapped"),
        row("gqa", "small", session="uneven"),
        auto_row("", **UNLIKE, model="experts global"),
        auto_row("", False, True, exchange="in_loss"),
        auto_row(table.DATA_EXCHANGE.fix, exchange="in_step"),
        *(
            replace(each, mistake=mistake)
            for mistake, each in (
                ("losses in no order", auto_row("in another order", exchange="in_loss")),
                ("scales in no order", auto_row(table.SCALES_ORDER.name, scale="calls")),
            )
        ),
        refused("exchange with other data-parallel ranks",
                row("gqa", exchange="in_loss", session="train")),
        *(refused(says.name, row(model, "across_ranks", form="one", tree="on_all_ranks", **values))
          for says, model, values in ((table.ACROSS_SCALES, "mtp", SCALED),
                                      (table.ACROSS_INDEXER, "dsa sparse loss", {}))),
    ],
    "dp3": [row("gqa", "small", tree="idle", ddp=ddp) for ddp in ("wrapped", "overlapped")],
    "ep2": [
        row("experts behind a dense layer", "graphs in chunks", form="one"),
        undone(table.STRAY_GRADIENT, "outside_mask", model="experts"),
        *(row(name, "small") for name in (
            "experts bias", "experts global", "experts all-gather")),
        row("experts both", "joined", "joined"),
        row("experts both", "small", form="thd_padded"),
        row("experts seq", "small"),
        row("experts both", "small", ddp="overlapped"),
        *(row(name, "recompute chunks") for name in ("replay", "replay slime")),
        row("mtp experts", "small", form="one", scale="calls"),
        auto_row(table.DATA_EXCHANGE.fix, model="aux_loss", exchange="in_loss"),
    ],
    "tp2_pp2": [row("tied, norms", "offload")],
    "cp2_pp2": [
        row("gpt-oss", "small"),
        row("gqa", "segment recompute"),
        row("own delta on stages", "recompute chunks"),
    ],
    "tp2_cp2": [row("experts both", "small"), row("own delta experts", "small")],
    "cp2_dp2": [
        row("gqa", "segment"),
        row("gqa", "small", session="uneven"),
        row("own delta attribute", "small"),
    ],
    "cp2_ep2": [
        row("mtp experts", "joined", form="thd"),
        row("own delta mtp", "small", labels="absent"),
    ],
    "cp4": [row("gemma", "wave"), row("own delta attribute", "small")],
    "pp2_vpp2_dp2": [
        auto_row("", **UNLIKE, ddp="overlapped"),
        row("experts global", "small"),
    ], "pp2_dp2": [row("experts all", "recompute", ddp="overlapped")],
    "pp2_ep2": [row("gdn experts", "small"), row("mtp experts", "whole", recompute="full")],
    "tp2_ep2": [row("experts both", "small", recompute="full")],
    "cp2_ep4": [row("experts both", "small")], "tp2_cp2_ep2_pp2": [row("mla experts", "small")],
}  # fmt: skip


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


@pytest.mark.parametrize("layout", ON_RANKS)
def test_ranks_make_the_stock_schedules_step(layout):
    """And a mistake shows; what is refused comes last."""
    rows = [*ON_RANKS[layout], *WRONG.get(layout, ())]
    judge.check(layout, sorted(rows, key=lambda each: each.expects == "refused"))
