"""Which segments run their layers on CUDA graphs.

A set of graphs is a segment's from its forward to its backward: nobody else may write where they
do.  As many sets are made as segments are between these at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.device import graphs
from megatron_prefix.layers.graphs.cut_layer import OTHER_LAYER, Cut, CutLayer, can_be_cut
from megatron_prefix.layers.graphs.segment_graphs import SegmentGraphs
from megatron_prefix.layers.kind import Graphed, Kind, Override, Part, Running
from megatron_prefix.layers.segment import SegmentContext

IN_THE_WAY = (
    "recompute_granularity", "fp8", "fp4", "delay_wgrad_compute", "cpu_offloading",
    "mtp_num_layers",
)  # fmt: skip
"""Options of Megatron with which a layer is not the same launches in every segment of a length."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
SEEN_BEFORE = 1
"""A length has graphs after so many segments of it: what is compiled for it is compiled there."""

logger = logging.getLogger(__name__)


def without_graphs(config: Any, kinds: Iterable[Kind | None]) -> str:
    """What keeps graphs from a layer with these kinds; "" if nothing does."""
    found = (one for one in kinds if one and one.graphed_in(config) is Graphed.NOTHING)
    return " and ".join(one.name for one in found)


def why_not(config: Any, layers: Sequence[Sequence[Kind]]) -> str:
    """Why no layer of a model runs on graphs; "" if nothing is known to be in the way.

    Args:
        config: the model's.
        layers: what fills the slots of each.
    """
    without = [one for kinds in layers if (one := without_graphs(config, kinds))]
    if without and len(without) == len([*layers]):
        return "the model has layers of " + " and ".join(dict.fromkeys(without))
    given = (name for name in IN_THE_WAY if getattr(config, name, None))
    return next((f"the model has {name}" for name in given), "")


class LayerGraphs:
    """Graphs of the layers of one model chunk.

    Args:
        layers: Megatron's, in the order in which they run, and what fills the slots of each, the
            MLP's last.
        running: says which segment runs.
        most: positions of the longest segment that has graphs.
        ranks: that share the positions of hidden states (sequence and context parallelism).
        group: tensor-parallel ranks. NCCL wants what one of them launches by a graph to be launched
            so by all, so they agree in a step's first such segment and after a capture.

    Attributes:
        cut: what layers call while they are captured; None at other times.
        refused: why nothing more is captured; "" if something may be.
        captures: how often all layers were captured.
    """

    def __init__(
        self, layers: Iterable[tuple[Any, Sequence[Part]]], running: Running, most: int,
        ranks: int, group: Any = None,
    ) -> None:  # fmt: skip
        self.cut: Cut | None = None
        self.refused, self.captures = "", 0
        self._modules, self._layers = list[Any](), list[CutLayer]()
        for number, (layer, parts) in enumerate(layers):
            if why := without_graphs(layer.config, (kind for kind, _ in parts)):
                logger.warning("layers of %s run without CUDA graphs", why)
            else:
                self._add(layer, number, *parts)
        self._running, self._group = running, group
        self._most, self._ranks = most, ranks
        self._seen: Counter[int] = Counter()
        self._free: list[SegmentGraphs] = []
        self._taken: dict[int, SegmentGraphs] = {}
        self._addresses: tuple[int, ...] = ()
        self._is_new, self._watched, self._said = True, False, False
        if self.refused:
            logger.warning("layers run without CUDA graphs: %s", self.refused)

    def _add(self, layer: Any, number: int, mixer: Part, mlp: Part) -> None:
        """A layer with graphs."""
        apart = mlp.kind is not None and mlp.kind.graphed_in(layer.config) is Graphed.IN_FRONT
        if apart and not can_be_cut(layer):
            apart, self.refused = False, OTHER_LAYER
        cut = CutLayer(layer, number, mixer.kind is not None, mlp.module if apart else None, self)
        cut.follows = bool(self._layers) and self._layers[-1].number == number - 1
        self._modules.append(layer)
        self._layers.append(cut)

    def overrides(self) -> Iterator[Override]:
        """What takes the place of methods of layers and their modules."""
        for number, (module, layer) in enumerate(zip(self._modules, self._layers, strict=True)):
            yield module, "forward", self._forward(number)
            yield from layer.overrides()

    def _forward(self, number: int) -> Callable[..., Any]:
        layer = self._layers[number]
        stock = layer.stock

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            context = self._running.current
            if context is None or context.backward or not torch.is_grad_enabled():
                return stock(hidden_states, *args, **kwargs)
            if number == 0 and not args:
                self._take(context, hidden_states, kwargs)
            mine = self._taken.get(context.index)
            if mine is None:
                return layer.plain(hidden_states, *args, **kwargs)
            return layer.replayed(mine.made[len(hidden_states)][number], hidden_states)

        return forward

    def begin_step(self) -> None:
        """Whether anything has moved is looked at in the first forward with gradients: in passes
        without them a trainer may have put gradients away."""
        self.end_step()
        self._is_new = True

    def _look(self) -> None:
        """Gives up what reads weights or writes gradients that lie elsewhere now."""
        self._is_new = False
        moved = bool(self._addresses) and self._addresses != self._current_addresses()
        moved, self._watched = self._on_any_rank(moved, self._is_watched())
        if moved:
            logger.info("weights or gradients lie elsewhere: CUDA graphs are captured again")
            self._free.clear()
            self._addresses = ()
        if self._watched and not self._said:
            self._said = True
            logger.warning("layers run without CUDA graphs: modules inside them have hooks")

    def _on_any_rank(self, *flags: bool) -> list[bool]:
        """Whether each is so on any tensor-parallel rank."""
        if self._group is None or self._group.size() == 1 or not self._layers:
            return [*flags]
        device = self._layers[0].parameters()[0].device
        numbers = torch.tensor(flags, dtype=torch.int32, device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return [bool(one) for one in numbers.tolist()]

    def _is_watched(self) -> bool:
        """Whether anything in the layers has hooks, which a replay would leave out: those with
        which Megatron's DDP waits for weights (overlap_param_gather), or somebody's own."""
        inside = (
            vars(one)
            for layer, module in zip(self._layers, self._modules, strict=True)
            for one in layer.modules()
            if one is not module  # its own are called around its forward
        )
        return any(fields[name] for fields in inside for name in _HOOKS)

    def release(self, segment: int) -> None:
        """After a segment's backward."""
        mine = self._taken.pop(segment, None)
        if mine is not None and not self.refused:
            self._free.append(mine)

    @property
    def uncounted_bytes(self) -> int:
        """Bytes that torch's counters of allocated memory leave out; see device/graphs.py."""
        return graphs.uncounted_bytes(one.pool for one in (*self._free, *self._taken.values()))

    def end_step(self) -> None:
        """Whatever has happened, no segment is between its forward and its backward."""
        if not self.refused:
            self._free += self._taken.values()
        self._taken.clear()

    def _current_addresses(self) -> tuple[int, ...]:
        weights = [one for layer in self._layers for one in layer.parameters()]
        buffers = (one for layer in self._layers for one in layer.buffers())
        mains = (getattr(one, "main_grad", None) for one in weights)
        places = (one.data_ptr() for one in (*weights, *buffers, *mains) if one is not None)
        trained = (one.requires_grad for one in weights)
        return (self._running.rotary.changes, *places, *trained)

    def _take(self, context: SegmentContext, hidden: Tensor, given: Mapping[str, Any]) -> None:
        """Gives a segment a set of graphs, with some of its length."""
        length = len(hidden)
        plain = context.offload is None and not torch.is_autocast_enabled(hidden.device.type)
        plain = plain and not (context.activates_again or context.recomputed)
        if not plain or length * self._ranks > self._most or self.refused:
            return
        if self._is_new:
            self._look()
        if self._watched:
            return
        self._seen[length] += 1
        if self._seen[length] <= SEEN_BEFORE:
            return
        mine = self._fitting(length)
        if length not in mine.made and not self._captured(mine, hidden, given):
            return
        mine.begin(given, context.positions)
        self._taken[context.index] = mine

    def _fitting(self, length: int) -> SegmentGraphs:
        """A set that nobody has: one with graphs of a length, else one with room for them, else a
        new one in the place of a smaller one."""
        fits = [one for one in self._free if length <= one.most]
        if fits or self._free:
            mine = max(fits or self._free, key=lambda one: length in one.made)
            self._free.remove(mine)
        if fits:
            return mine
        return SegmentGraphs(self._layers, length, self, self._running.rotary)

    def _captured(self, mine: SegmentGraphs, hidden: Tensor, given: Mapping[str, Any]) -> bool:
        why = ""
        try:
            mine.capture(hidden, given)
        except Exception as problem:  # noqa: BLE001 - whatever it is, layers run without graphs
            graphs.recover()
            why = (str(problem) or type(problem).__name__).splitlines()[0]
        (failed,) = self._on_any_rank(bool(why))
        if failed:
            self.refused = why or "another tensor-parallel rank could not capture its layers"
            logger.warning("layers run without CUDA graphs: %s", self.refused)
            self._free.clear()
            return False
        self._addresses, self.captures = self._current_addresses(), self.captures + 1
        logger.info("%d layers captured for %d positions", len(self._layers), len(hidden))
        return True
