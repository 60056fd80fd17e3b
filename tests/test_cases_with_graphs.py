"""Rows of layers on CUDA graphs, whose launches are noted and launched again on the CPU."""

import pytest

from tests import judge
from tests.cases import row

pytestmark = pytest.mark.usefixtures("on_one_rank")
POLICIES = ("graphs recompute", "graphs recompute_act")
SMALL = {"tree": "groups", "session": "train", "form": "rows"}
"""Two steps of two microbatches: the second has its graphs from the first."""
ROWS = [
    *(row("gqa", options) for options in POLICIES),
    *(row(name, "graphs in chunks", **SMALL) for name in ("qk_norm", "mla", "gpt-oss experts")),
    # Experts run between graphs.
    *(row(name, "graphs", **SMALL) for name in ("gpt-oss", "experts both")),
    row("experts shared", "graphs in chunks", **SMALL),
    row("experts behind a dense layer", "graphs recompute", **SMALL),
    row("mla experts", "graphs in chunks", **SMALL),
    row("replay_forward", "graphs in chunks", **SMALL),
    # Recurrent layers, whose cores run between graphs.
    *(row(name, options, **SMALL) for name in ("gdn", "mamba") for options in POLICIES),
    row("mamba", "graphs offload", **{**SMALL, "session": "train_thrice"}),
    *(row(name, "graphs in chunks", **SMALL) for name in ("gdn experts", "mtp 2", "mtp gdn")),
    # Most parameters may be frozen.
    *(
        row(name, "graphs", **SMALL)
        for name in ("gdn, fc2 alone", "mamba, A_log alone", "routers frozen")
    ),
    row("mamba alone", "graphs in chunks", **SMALL),
]


@pytest.mark.parametrize("each", ROWS, ids=str)
def test_a_step_on_graphs_is_the_stock_schedules(each):
    assert judge.complaints(each) == []
