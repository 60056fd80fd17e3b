"""Faults that are put into the package on purpose: every one makes rows wrong, or the rows prove
nothing. By name what replaces what."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_prefix.features.across.span_sums import SpanSums
from megatron_prefix.features.dsa import sparse
from megatron_prefix.features.dsa.sparse import Sparse
from megatron_prefix.features.experts import tokens
from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.ledger import RouterLedger
from megatron_prefix.features.mla.latent import Latents
from megatron_prefix.features.mtp.tables import Division
from megatron_prefix.features.qat import quantisers
from megatron_prefix.features.recurrent import delta, states
from megatron_prefix.features.recurrent.spans import Spans
from megatron_prefix.features.windows import windowed
from megatron_prefix.features.windows.windowed import Tails, WindowKeys
from megatron_prefix.layers.blocks import core
from megatron_prefix.layers.blocks.rotary import Rotary
from megatron_prefix.plan.actions import Plan
from megatron_prefix.run import planning, schedule
from megatron_prefix.run.execute.executor import Executor
from megatron_prefix.sidecar.arena import Arena
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.sidecar.row_exchange import RowExchange
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import Form

_COLUMNS, _CLOSING = tokens.columns_of, tokens.LogicalTokens.closing
_IN_LOSS = Division.in_loss
_ENTER, _PUT = GroupCounts.enter, SpanSums.put
_EXECUTOR = Executor.__init__
_TAILS_RETURNED = Tails.returned


def _first_rollout(rows: Any, *place: int) -> list[np.ndarray]:
    """Every row stands for its first rollout only."""
    return _COLUMNS([span._replace(rollouts=span.rollouts[:1]) for span in rows], *place)


def _one_microbatch(self: tokens.LogicalTokens, microbatches: tuple[int, ...]) -> tokens.Closing:
    """Microbatches that end together are one."""
    closing = _CLOSING(self, microbatches)
    return closing._replace(place=torch.zeros_like(closing.place))


def _this_rank(self: GroupCounts, router: Any) -> int:
    """Counts of this rank only."""
    return _ENTER(self, SimpleNamespace(tp_dp_cp_group=SimpleNamespace(size=lambda: 1)))


def _each_by_itself(self: RouterLedger, layer: int, microbatches: tuple[int, ...]) -> torch.Tensor:
    """Counts of each microbatch, not of those before it too."""
    place = self._places[layer]
    return torch.stack([self._group_counts.take(place, m) for m in microbatches])


def _nothing_of_others(self: SpanSums, layer: int, index: int, name: str, sums: Any) -> None:
    """Nothing is counted for other ranks."""
    _PUT(self, layer, index, name, torch.zeros_like(sums))


def _share_of_the_other(self: Division, left: Any, whole: Any) -> Any:
    """The owner's share of a context-parallel rank is taken for that of the other."""
    return _IN_LOSS(self, left[:, ::-1], whole[:, ::-1])


def of_stock(owner: Any, name: str, change: Callable[[Any], Any]) -> tuple[Any, str, Any]:
    return owner, name, change(getattr(owner, name))


def of_states(verb: str, change: Callable[[Any], Any]) -> tuple[Any, str, Any]:
    """What the sidecar answers to recurrent layers, changed."""
    stock = getattr(SidecarCache, verb)

    def changed(self: SidecarCache, layer: int, *args: Any) -> Any:
        answer = stock(self, layer, *args)
        return change(answer) if self.forms[layer] is Form.SPANS else answer

    return SidecarCache, verb, changed


def _only(kept: int) -> Callable[[Any], Any]:
    """Of two gradients one; the other is zero."""

    def change(sent: Any) -> Any:
        if sent is None:
            return None
        return [
            part if place == kept else torch.zeros_like(part) for place, part in enumerate(sent)
        ]

    return change


def _last_child(stock: Any) -> Any:
    """A segment's gradients take the place of those before it."""

    def add(self: Any, seen: Any, what: Any, gradients: Any) -> None:
        if not self.rows.zeros:  # of attention
            return stock(self, seen, what, gradients)
        if not self.sums:
            self.allocate(self.values, sums=True)
        for total, part in zip(self.sums, gradients, strict=True):
            total.index_copy_(0, what.rows, part.to(total.dtype))
        return None

    return add


def _last_span(gradient: torch.Tensor, numbers: int | torch.Tensor) -> torch.Tensor:
    if isinstance(numbers, int):
        return gradient[numbers - 1 :: numbers]
    return gradient[numbers.cumsum(0) - 1]


def _sums_are_left(stock: Any) -> Any:
    """Rows are used again, with what others have sent to them."""

    def write(self: Any, index: int, payload: Any) -> None:
        if not self.rows.zeros:  # of attention
            return stock(self, index, payload)
        kept, self.sums = self.sums, []
        stock(self, index, payload)
        self.sums = kept
        return None

    return write


def _another_parent(stock: Any) -> Any:
    def wrong(self: Spans, lengths: Any, parents: Any, device: Any) -> None:
        stock(self, lengths, [max(1, row - 1) if row else 0 for row in parents], device)

    return wrong


def _not_moved(y: torch.Tensor, places: torch.Tensor, again: torch.Tensor, _: Any) -> torch.Tensor:
    """Gradients go where values were overwritten."""
    change = torch.zeros_like(y)
    change[0] = change[0].index_copy(0, places, again - y[0, places].detach())
    return y + change


def _weightless(stock: Any) -> Any:
    """No gradient of a projection's weights."""

    def wrong(self: Latents, payload: Any) -> Any:
        both, pull = stock(self, payload)
        return both, lambda gradients: (pull(gradients)[0], [None] * len(self.weights))

    return wrong


def _zeros_to_ancestors(stock: Any) -> Any:
    def wrong(self: Sparse, payload: Any) -> Any:
        both, pull = stock(self, payload)
        return both, lambda gradients: pull(tuple(0 * one for one in gradients))

    return wrong


STATES: dict[str, tuple[Any, str, Any]] = {
    "no state": of_states("read", lambda both: (torch.zeros_like(both[0]), both[1])),
    "no tail": of_states("read", lambda both: (both[0], torch.zeros_like(both[1]))),
    "reversed tail": of_states("read", lambda both: (both[0], both[1].flip(1))),
    "no gradient of states": of_states("take", _only(1)),
    "no gradient of tails": of_states("take", _only(0)),
    "the last segment alone": of_stock(Arena, "add", _last_child),
    "a child of a segment": (states, "summed", _last_span),
    "the neighbour's parent": of_stock(Spans, "__init__", _another_parent),
    "sums of other rows": of_stock(Arena, "write", _sums_are_left),
    "own inputs in the tail": of_stock(
        Spans, "edges", lambda stock: lambda self, before: stock(self, before)._replace(tail=None)
    ),
    "padding makes steps": of_stock(
        Spans, "batches",
        lambda stock: lambda *given: [one._replace(padding=None) for one in stock(*given)],
    ),
    "other spans are seen": (delta, "overwritten", lambda y, *_: y),
    "gradients into other spans": (delta, "overwritten", _not_moved),
}  # fmt: skip
"""Of recurrent layers: "tail" is of the convolution."""
LATENT: dict[str, tuple[Any, str, Any]] = {
    "no gradient of latents": (Latents, "arrived", lambda self: None),
    "half a gradient": of_stock(
        Latents, "arrived",
        lambda stock: lambda self: None if (sent := stock(self)) is None else sent / 2,
    ),
    "no gradient of rotated keys": of_stock(
        Latents, "returned",
        lambda stock: lambda self, of, sent, both: stock(self, of, (sent[0], 0 * sent[1]), both),
    ),
    "no gradient of the projection": of_stock(Latents, "keys_with_pull", _weightless),
    "positions from 0": of_stock(
        Rotary, "of",
        lambda stock: lambda self, module, at: stock(self, module, torch.arange(len(at))),
    ),
    "latents of other rows": of_stock(
        Latents, "left",
        lambda stock: lambda self, of, *both: (
            stock(self, of, *both)[0].roll(1, 0), both[0][:, 0, 16:],
        ),
    ),
}  # fmt: skip
WINDOWS: dict[str, tuple[Any, str, Any]] = {
    "no gradient to ancestors": of_stock(
        WindowKeys, "pull",
        lambda stock: lambda self, layer, context, both: stock(
            self, layer, context, tuple(0 * one for one in both)
        ),
    ),
    "nothing of tails returns": (Tails, "returned", lambda self, *both: None),
    "the first positions": of_stock(
        windowed, "window_keys",
        lambda stock: lambda *given: stock(*given)._replace(
            last=stock(*given).last.new_tensor(range(len(stock(*given).last)))
        ),
    ),
    "no sink": (core, "with_sink", lambda out, lse, sink: (out, lse)),
    "no gradient of sinks": (core, "sink_gradient", lambda *given: torch.zeros_like(given[-1])),
}  # fmt: skip
SPARSE: dict[str, tuple[Any, str, Any]] = {
    "ancestors are not seen": of_stock(
        sparse, "seen_of",
        lambda stock: lambda *given: [
            one._replace(rows=one.rows[-(one.stop - one.first) :]) for one in stock(*given)
        ],
    ),
    "the first keys": of_stock(
        sparse, "choose",
        lambda stock: lambda *given: (torch.zeros_like(stock(*given)[0]), stock(*given)[1]),
    ),
    "no relu": of_stock(
        sparse, "choose", lambda stock: lambda index, topk, _: stock(index, topk, False)
    ),
    "index keys from position 0": of_stock(
        Sparse, "angles",
        lambda stock: lambda self, rotary, forward: (
            forward if rotary is self.indexer.rotary_pos_emb else stock(self, rotary, forward)
        ),
    ),
    "zeros to ancestors": of_stock(Sparse, "keys_with_pull", _zeros_to_ancestors),
    "nothing of descendants returns": (Sparse, "returned", lambda self, *both: None),
}  # fmt: skip


def _without_the_last(self: Executor, plan: Plan, *rest: Any, **more: Any) -> None:
    """The last action of every rank, the backward of a root, is left out."""
    programs = tuple(program[:-1] for program in plan.programs)
    _EXECUTOR(self, replace(plan, programs=programs), *rest, **more)


# Windows of context-parallel ranks: rows of this rank only, and orders of layers with a window.


def _gradients_of_this_rank(self: Tails, context: Any, sent: Any, both: Any) -> Any:
    cache = context.cache
    alone = {name: getattr(cache, name) for name in ("once", "tail", "map")}
    alone["exchange"] = SimpleNamespace(total=lambda mine: mine)
    context = SimpleNamespace(index=context.index, cache=SimpleNamespace(**alone))
    return _TAILS_RETURNED(self, context, sent, both)


def _layout(**broken: Any) -> Any:
    assert broken.keys() <= vars(cp_layout).keys()
    return SimpleNamespace(**{**vars(cp_layout), **broken})


def _turned(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    return cp_layout.pieces(length, rank, size)[::-1]


def _as_gathered(lengths: Any, size: int) -> Any:
    return np.arange(sum(lengths))


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    **STATES,
    **LATENT,
    **WINDOWS,
    **SPARSE,
    "quantisers are not refused": (quantisers, "refusals", lambda *_: ()),
    "suffixes send nothing": (Arena, "add", lambda *_: None),
    "rows for tokens": (tokens, "columns_of", _first_rollout),
    "waves for microbatches": (tokens.LogicalTokens, "closing", _one_microbatch),
    "counts of a rank": (GroupCounts, "enter", _this_rank),
    "counts in no order": (RouterLedger, "_averages", _each_by_itself),
    "the other rank's share": (Division, "in_loss", _share_of_the_other),
    "no counts for other ranks": (SpanSums, "put", _nothing_of_others),
    "losses in no order": (schedule, "are_in_order", lambda *_: False),
    "scales in no order": (planning, "are_in_order", lambda *_: False),
    "no last backward": (Executor, "__init__", _without_the_last),
    "last rows of this rank": (RowExchange, "total", lambda self, mine: mine),
    "gradients of this rank": (Tails, "returned", _gradients_of_this_rank),
    "pieces turned": (windowed, "cp_layout", _layout(pieces=_turned)),
    "keys as gathered": (windowed, "cp_layout", _layout(view_order=_as_gathered)),
}
"""Owner, name, and what stands there instead."""
