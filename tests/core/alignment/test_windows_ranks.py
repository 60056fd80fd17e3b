"""Sliding windows and sinks on context-parallel ranks, in fp64: against the stock schedule in the
same layout, whose attention there is lab/models/local.py's, and against that of one rank.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.windows import windowed
from megatron_prefix.features.windows.windowed import Tails, WindowKeys, last_positions
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.layers import table
from megatron_prefix.refusals.table import LEARNED_SINKS_CP, SINKS_CP, WINDOW_CP
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.sidecar.row_exchange import RowExchange
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import Form
from tests.harness.context_parallel import DATA, spec
from tests.harness.one_rank import one_rank, small_model
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.turns

LAYOUTS = {
    "cp2": Layout(cp=2),
    "cp4": Layout(cp=4),
    "tp2 cp2": Layout(tp=2, cp=2, sequence_parallel=True),
    "pp2 cp2": Layout(pp=2, cp=2),
}


def window(left: int, every: Any = 2, softmax: str = "learnable") -> dict[str, Any]:
    return {"window_size": (left, 0), "window_attn_skip_freq": every, "softmax_type": softmax}


# Pieces of spans are 1 to 18 positions: the windows are narrower, as wide, and wider than spans.
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss": window(5),
    "two to one (Gemma)": window(11, [1, 1, 0], "vanilla"),
    "off by one, all wide (Mistral)": window(40, None, "off-by-one"),
    "windows last": window(1, [0, 1]),
}


def built(layout: Layout, name: str, **options: Any) -> list[Any]:
    """This rank's model chunks; sinks are not zero, and equal on ranks that share them."""
    overrides = MODELS[name] | options.pop("config_overrides", {})
    every = overrides["window_attn_skip_freq"]
    if isinstance(every, list):  # of the layers of a stage
        overrides["window_attn_skip_freq"] = every * layout.pp
    layers = (len(every) if isinstance(every, list) else 2) * layout.pp
    model = dataclasses.replace(spec(), num_layers=layers)
    chunks = build_model(
        model, layout=layout, dtype="float64", config_overrides=overrides, **options
    )
    for chunk in chunks:
        for parameter, sink in unwrap(chunk).named_parameters():
            if "softmax_offset" in parameter:
                heads = 4 // layout.tp
                first = parallel_state.get_tensor_model_parallel_rank() * heads
                draw = torch.Generator().manual_seed(len(sink))
                sink.data.copy_(torch.randn(4, generator=draw)[first : first + heads])
    return chunks


# Against one rank ---------------------------------------------------------------------------------


# What is kept -------------------------------------------------------------------------------------


def kept(name: str, size: int) -> list[tuple[float, float]]:
    """Per way of cp_reduce bytes of the sidecar, predicted and held."""
    layout = Layout(cp=size)
    runtime.initialize(layout)
    chunks = built(layout, name)
    items = align.on_this_cp_rank(align.microbatches(DATA["tree"], 7, layout.alignment))
    found = []
    for reduce in ("wave", "segment"):
        schedule = PrefixSchedule(PrefixConfig(min_gain=0, cp_reduce=reduce))  # type: ignore[arg-type]
        align.run_step(schedule, chunks, items)
        report: Any = schedule.report
        found.append((report.memory.cache_peak, report.cache_bytes))
    return found


def test_every_rank_keeps_the_last_rows_of_all() -> None:
    assert Form("positions", 5).rows(48, 4) == 5
    assert Form("positions", 200).rows(48, 4) == 48
    assert Form.POSITIONS.rows(48, 4) == 12


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("last", [1, 3, 8, 100])
def test_last_rows_are_dealt_once(size: int, last: int) -> None:
    """Of all last positions each is some rank's, at its place."""
    lengths = [8 * size, 2 * size, 12 * size]
    left = [Form("positions", last).rows(length) for length in lengths]
    whole = np.full(sum(left), -1)
    for rank in range(size):
        held = cp_layout.held_positions(lengths, rank, size)
        mine, places = last_positions(lengths, left, rank, size)
        assert (whole[places] == -1).all()
        whole[places] = held[mine]
    ends = np.cumsum(lengths)
    wanted = [np.arange(end - num, end) for end, num in zip(ends, left, strict=True)]
    assert (whole == np.concatenate(wanted)).all()


# What transformer-engine itself has not -----------------------------------------------------------


@pytest.mark.parametrize(
    ("softmax", "how", "expected"),
    [("vanilla", None, []), ("learnable", None, []), ("vanilla", "a2a", []),
     ("vanilla", "all_gather", []), ("vanilla", "p2p", [WINDOW_CP]),
     ("vanilla", "a2a+p2p", [WINDOW_CP]), ("off-by-one", "a2a", []),
     ("off-by-one", "all_gather", [SINKS_CP]), ("learnable", "p2p", [SINKS_CP, WINDOW_CP]),
     ("learnable", "a2a", [LEARNED_SINKS_CP])],
)  # fmt: skip
def test_what_the_stock_module_cannot_do_is_refused(
    softmax: str, how: str | None, expected: list[Any]
) -> None:
    """The module says how it exchanges keys; Megatron's own one has no context parallelism."""
    with one_rank():
        model = unwrap(small_model(config_overrides=window(4, None, softmax)))
        part = table.payload_parts(model)[0]
        config = dataclasses.replace(model.config)
    config.context_parallel_size = 2
    if how is not None:
        part.module.core_attention.cp_comm_type = how
    assert part.kind is not None
    found = [one.refusal for one in part.kind.option_refusals(part.module, config)]
    assert found == expected
    config.context_parallel_size = 1
    assert not [*part.kind.option_refusals(part.module, config)]


# What is wrong is noticed -------------------------------------------------------------------------


def _layout(**broken: Callable[..., Any]) -> Callable[[Any], Any]:
    """The layout with other functions, for window layers only."""
    assert broken.keys() <= vars(cp_layout).keys()
    return lambda stock: types.SimpleNamespace(**{**vars(stock), **broken})


def _reversed(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    return cp_layout.pieces(length, rank, size)[::-1]


BROKEN: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "last rows of this rank only": (RowExchange, "total", lambda stock: lambda self, mine: mine),
    "gradients of this rank only": (
        Tails, "returned",
        lambda stock: lambda self, context, sent, both: stock(
            self, types.SimpleNamespace(index=context.index, cache=_without_total(context.cache)),
            sent, both,
        ),
    ),
    "no gradient to ancestors": (
        WindowKeys, "pull",
        lambda stock: lambda self, layer, context, both: stock(
            self, layer, context, tuple(0 * one for one in both)
        ),
    ),
    "pieces in another order": (windowed, "cp_layout", _layout(pieces=_reversed)),
    "keys as they were gathered": (
        windowed, "cp_layout", _layout(view_order=lambda lengths, size: np.arange(sum(lengths))),
    ),
}  # fmt: skip


def _without_total(cache: Any) -> Any:
    alone = types.SimpleNamespace(
        **{name: getattr(cache, name) for name in ("once", "tail", "map")}
    )
    alone.exchange = types.SimpleNamespace(total=lambda mine: mine)
    return alone


def noticed(name: str) -> bool:
    """Whether this rank's verdict is that something is wrong."""
    owner, method, broken = BROKEN[name]
    runtime.initialize(LAYOUTS["cp2"])
    chunks, config = built(LAYOUTS["cp2"], "gpt-oss"), PrefixConfig(min_gain=0, chunk_tokens=16)
    items = align.on_this_cp_rank(align.microbatches(DATA["long prompt"], 7, 4))
    stock = align.run_step(get_forward_backward_func(), chunks, items)
    setattr(owner, method, broken(getattr(owner, method)))
    ours = align.run_step(PrefixSchedule(config), chunks, items)
    pairs = [(ours.gradients[name], wanted) for name, wanted in stock.gradients.items()]
    return any(float((one - two).abs().max()) > 1e-3 * float(two.abs().max()) for one, two in pairs)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_noticed(name: str) -> None:
    assert all(run_ranks(2, noticed, name))
