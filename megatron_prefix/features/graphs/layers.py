"""Which segments run their layers on CUDA graphs.

A set of graphs is a segment's from its forward to its backward: nobody else may write where they
do.  As many sets are made as segments are between these at once.  A segment that is recomputed by
policy keeps none in between: it has one in its forward, and again when that runs again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.features.graphs import cuda
from megatron_prefix.features.graphs.choice import Held, Needs
from megatron_prefix.features.graphs.cut_layer import Cut, CutLayer
from megatron_prefix.features.graphs.inside import Inside, hooks_of
from megatron_prefix.features.graphs.kinds import without_graphs
from megatron_prefix.features.graphs.pieces import CannotCaptureError
from megatron_prefix.features.graphs.placed import PlacedForm
from megatron_prefix.features.graphs.placed_arenas import PlacedArenas
from megatron_prefix.features.graphs.placed_runs import PlacedKernel, placed_runs
from megatron_prefix.features.graphs.segment_graphs import ROTARY, GraphForm, SegmentGraphs
from megatron_prefix.layers.kind import Kind, Override, Part, Running
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.plan.sizes import place_of
from megatron_prefix.run.read.loss_variables import package
from megatron_prefix.sidecar.cache import SegmentState

IN_THE_WAY = "recompute_granularity", "fp8", "fp4", "delay_wgrad_compute", "cpu_offloading"
"""Options of Megatron with which a layer is not the same launches in every segment of a length."""
CHANGED = "what a layer gives the next was replaced between them: set graph_tokens to 0"
LIGHTER = 0.875
"""What a set for segments whose activations run again holds, about, of what others do."""
SEEN_BEFORE = 1
"""A length has graphs after so many segments of it, as what is compiled for it is compiled there;
at once where a set has a place for it, which would be there for nothing."""

logger = logging.getLogger(__name__)


def why_not(config: Any, layers: Sequence[Sequence[Kind]]) -> str:
    """Why no layer of a model runs on graphs; "" if nothing is known to be in the way.

    Args:
        config: the model's.
        layers: what fills the slots of each.
    """
    without = [reason for kinds in layers if (reason := without_graphs(config, kinds))]
    if without and len(without) == len(layers):
        return "the model has layers of " + " and ".join(dict.fromkeys(without))
    provided = (name for name in IN_THE_WAY if getattr(config, name, None))
    return next((f"the model has {name}" for name in provided), "")


class LayerGraphs:
    """Graphs of the layers of one model chunk.

    Args:
        layers: Megatron's, in the order in which they run, each behind its number, and what fills
            its slots, the MLP's last. A layer is given what the one before it gives if their
            numbers follow each other.
        running: says which segment runs.
        most: positions of the longest segment that has graphs.
        ranks: that share the positions of hidden states (sequence and context parallelism).
        group: tensor-parallel ranks. NCCL wants what one of them launches by a graph to be launched
            so by all, so they agree in a step's first such segment and after a capture.
        handed: whether nobody else reads or writes that.
        further: the number from which on they are inside multi-token prediction; 0: none is.

    Attributes:
        further: as given.
        layers: those with graphs.
        most: as given.
        refused: why nothing more is captured; "" if something may be.
        captures: how often all layers were captured.
        captured: seconds of captures in the step that runs, or ran last.
        used: whether segments had graphs in it.
    """

    def __init__(
        self, layers: Iterable[tuple[int, Any, Sequence[Part]]], running: Running, most: int,
        ranks: int, group: Any = None, handed: bool = False, *, further: int = 0,
    ) -> None:  # fmt: skip
        self._current_cut: Cut | None = None
        self.further = further
        self.refused, self.captures, self.captured, self.used = "", 0, 0.0, False
        self._all = self.layers = self._cut(layers)
        self._follow()
        self._inside = Inside(self.layers)
        self._running, self._group = running, group
        self.most, self._ranks = most, ranks
        self._seen: Counter[int] = Counter()
        self._free: list[SegmentGraphs] = []
        self._taken: dict[int, SegmentGraphs] = {}
        self._recomputed: Collection[int] = ()
        self._needs = Needs(0)
        self._addresses: tuple[float, ...] = ()
        self._is_new, self._watched, self._said = True, False, False
        self._handed = handed
        self._given: tuple[Callable[[], Tensor | None], int] | None = None
        self.arenas = PlacedArenas()

    def _cut(self, layers: Iterable[tuple[int, Any, Sequence[Part]]]) -> list[CutLayer]:
        """Those that have graphs; a line says why others have none."""
        result, without = list[CutLayer](), dict[str, None]()
        for number, layer, (mixer, mlp) in layers:
            if names := without_graphs(layer.config, (mixer.kind, mlp.kind)):
                without[f" of {names} run without CUDA graphs"] = None
                continue
            try:
                result.append(CutLayer(layer, number, mixer, mlp, self))
            except CannotCaptureError as problem:
                without[f" run without CUDA graphs: {problem}"] = None
        for why in without:
            logger.warning("layers%s", why)
        return result

    @property
    def cut(self) -> Cut | None:
        """What layers call while they are captured; None at other times."""
        return self._current_cut

    @cut.setter
    def cut(self, cut: Cut | None) -> None:
        self._current_cut = cut
        self._running.tap = None if cut is None else cut.core

    @contextlib.contextmanager
    def attending(self, context: SegmentContext) -> Iterator[None]:
        """See Cuts."""
        running = self._running
        before = running.current, running.tap, running.kernels
        running.current, running.tap = context, None
        running.kernels = {w: PlacedKernel(kernel) for w, kernel in running.kernels.items()}
        try:
            yield
        finally:
            running.current, running.tap, running.kernels = before

    def _follow(self) -> None:
        numbers = {layer.number for layer in self.layers}
        for layer in self.layers:
            layer.follows = layer.number - 1 in numbers

    def overrides(self) -> Iterator[Override]:
        """What takes the place of methods of layers and their modules."""
        for layer in self._all:
            yield layer.module, "forward", self._forward(layer)
            yield from layer.overrides()

    def _forward(self, layer: CutLayer) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            context, saves = self._running.current, torch.is_grad_enabled()
            if context is None or context.backward:
                return layer.stock(hidden_states, *args, **kwargs)
            if not saves and context.index not in self._recomputed:
                return layer.stock(hidden_states, *args, **kwargs)
            if self.layers and layer is self.layers[0] and not args:
                self._take(context, hidden_states)
            chosen = self._taken.get(context.index)
            sides = chosen.made[chosen.form].get(layer.number) if chosen else None
            if sides is None:
                return layer.plain(hidden_states, *args, **kwargs)
            if not sides.pieces and not self._is_given(hidden_states):
                self._handed = False
                raise RuntimeError(CHANGED)
            # A set whose segment runs again is another's before what this one sends has gone.
            stays, left = saves or layer is not self._all[-1], None
            if sides.inside:
                for number in sides.inside:
                    self._enter(context, number)
                left = functools.partial(_leave, context, sides.inside)
            result = layer.replayed(sides, hidden_states, stays=stays, left=left)
            given = result if isinstance(result, Tensor) else result[0]
            self._given = weakref.ref(given), given._version
            return result

        return forward

    def _is_given(self, hidden: Tensor) -> bool:
        """Whether it is what the last layer has given, and nobody has written to it."""
        given, version = self._given or (lambda: None, 0)
        return given() is hidden and hidden._version == version

    def _enter(self, context: SegmentContext, layer: int) -> None:
        """Before graphs read and write the arena of a layer."""
        cache, index, arena = context.cache, context.index, self.arenas.layers[layer]
        cache.check(layer, index)
        arena.enter(context)
        if context.inner and cache.state(layer, index) is not SegmentState.CAPTURED:
            arena.reuse(index)
            cache.device = arena.values[0].device
            cache.captured(layer, index)

    def begin_step(
        self,
        recomputed: Collection[int] = (),
        arenas: PlacedArenas | None = None,
        needs: Needs | None = None,
    ) -> None:
        """Whether anything has moved is looked at in the first forward with gradients: in passes
        without them a trainer may have put gradients away. Sets that the step's plan does not count
        are dropped before it runs.

        Args:
            recomputed: segments whose forward runs again before their backward.
            arenas: of the step; None: others.
            needs: of its plan; None: not known.
        """
        self.end_step()
        self.arenas = arenas or PlacedArenas()
        self._is_new, self._recomputed = True, recomputed
        self.captured, self.used = 0.0, False
        if needs is not None:
            self._free = [*self._counted(needs)]
        self._needs = needs or Needs(0)

    def _counted(self, needs: Needs) -> Iterator[SegmentGraphs]:
        """Sets that a plan counts, of those that nobody has. Where activations of all its segments
        run again, these have no others' graphs beside theirs, for which more is kept; nor instead
        of theirs, where the last step's did not."""
        plain = max(LIGHTER * needs.longest, needs.plain) / self._ranks
        kept = Counter(place // self._ranks for place in needs.kept)
        before = self._needs
        fewer = {True: needs.plain < before.plain, False: needs.kept_plain < before.kept_plain}
        for graphs in self._free:
            has_light = fewer[graphs.passes] or graphs.longest(taps_mlps=True)
            others = has_light and graphs.longest(taps_mlps=False)
            if graphs.passes:
                if graphs.most == needs.longest // self._ranks and others <= plain:
                    yield graphs
            elif kept[graphs.most] and (needs.kept_plain or others <= LIGHTER * graphs.most):
                kept[graphs.most] -= 1
                yield graphs

    def _look(self) -> None:
        """Gives up what reads weights or writes gradients that lie elsewhere now."""
        self._is_new = False
        replaced = [layer.leave_out_replaced() for layer in self.layers]
        if any(replaced):
            self._inside = Inside(self.layers)
        hooks = self._inside.look()
        moved = bool(self._addresses) and self._addresses != self._current_addresses()
        moved, self._watched = map(bool, self._most_of_ranks(moved, _are_others(hooks)))
        if moved:
            logger.info("weights or gradients have moved: CUDA graphs are captured again")
            self._free.clear()
            self._addresses = ()
        if self._watched and not self._said:
            self._said = True
            logger.warning("layers run without CUDA graphs: modules inside them have hooks")

    def _most_of_ranks(self, *numbers: int) -> list[int]:
        """The largest of each on tensor-parallel ranks."""
        if self._group is None or self._group.size() == 1 or not self.layers:
            return [*numbers]
        device = self.layers[0].parameters()[0].device
        pair = torch.tensor(numbers, dtype=torch.int32, device=device)
        dist.all_reduce(pair, dist.ReduceOp.MAX, group=self._group)
        result: list[int] = pair.tolist()
        return result

    def release(self, segment: int) -> None:
        """After a segment's backward, and after the forward of one that runs again before it."""
        chosen = self._taken.pop(segment, None)
        if chosen is not None and chosen.layers is self.layers:
            self._free.append(chosen)

    @property
    def uncounted_bytes(self) -> int:
        """Bytes that torch's counters of allocated memory leave out; see cuda.py."""
        return cuda.uncounted_bytes(graphs.pool for graphs in self.sets)

    @property
    def device_bytes(self) -> int:
        """See `Kept` in megatron/install.py: of places, which are allocated between steps, too."""
        return sum(graphs.placed_bytes for graphs in self.sets) + self.arenas.device_bytes

    @property
    def held(self) -> Held:
        """What its sets hold, of each kind the one with most, and its arenas."""
        kinds: tuple[list[float], ...] = [0.0], [0.0], [0.0], [0.0]
        for graphs in self.sets:
            plain, light = (graphs.longest(taps_mlps=taps) for taps in (False, True))
            is_light, longest = plain < LIGHTER * light, max(plain, light, 1)
            size = cuda.uncounted_bytes([graphs.pool]) / longest + graphs.placed_bytes / graphs.most
            kinds[2 * is_light + (not graphs.passes)].append(size / self._ranks)
        return Held(*map(max, kinds))._replace(arenas=self.arenas.device_bytes)

    @property
    def sets(self) -> Iterator[SegmentGraphs]:
        """All that there are."""
        return itertools.chain(self._free, self._taken.values())

    def give_back(self) -> None:
        """Drops all sets and arenas, with their memory."""
        self.arenas.give_back()
        self.drop_sets()

    def drop_sets(self) -> None:
        """Between two attempts of a step, as the first ran out of memory, and in the second
        segments that had a set each share one; arenas may be those of a step that begins."""
        self._free.clear()
        self.arenas, self._addresses = PlacedArenas(), ()

    def end_step(self) -> None:
        """Whatever has happened, no segment is between its forward and its backward."""
        self._free += (graphs for graphs in self._taken.values() if graphs.layers is self.layers)
        self._taken.clear()
        self._recomputed = ()

    def _current_addresses(self) -> tuple[float, ...]:
        arenas = id(self.arenas), self.arenas.changes
        scales = (layer.scale for layer in self.layers)
        return (self._running.rotary.changes, *arenas, *self._inside.addresses(), *scales)

    def _take(self, context: SegmentContext, hidden: Tensor) -> None:
        """Gives a segment a set of graphs, with some of its length."""
        length = len(hidden)
        plain = context.saving is None and not torch.is_autocast_enabled(hidden.device.type)
        if not plain or length * self._ranks > self.most or self.refused:
            return
        if self._is_new:
            self._look()
        if self._watched:
            return
        self._seen[length] += 1
        form = self._form(context, hidden)
        passes = not context.inner or context.index in self._recomputed
        place = self._place(length, passes=passes)
        chosen = self._unused(place, form, passes=passes)
        if chosen is None and self._seen[length] <= SEEN_BEFORE:
            return
        if chosen is None:
            rotary, arenas = self._running.rotary, self.arenas
            chosen = SegmentGraphs(self.layers, place, self, rotary, arenas, passes=passes)
        provided = {ROTARY: self._running.angles}  # Mamba2, which may be the first, is given none
        covering = chosen.covering(form)
        if covering is None and not self._captured(chosen, form, hidden, provided):
            return
        chosen.form = covering or form
        chosen.begin(provided, context)
        self._taken[context.index], self.used = chosen, True

    def _form(self, context: SegmentContext, hidden: Tensor) -> GraphForm:
        placed, arenas = None, self.arenas
        most = placed_runs(self._running, hidden.device)
        if most and arenas.layers and any(layer.inside for layer in self.layers):
            placed = PlacedForm.of(context, most, max(layer.before for layer in self.layers))
            uses = placed is not None and (placed.inner or placed.levels or placed.spans)
            if uses and len(arenas.values) < len(arenas.layers):  # nothing was written yet
                placed = None
        taps_mlps = self._running.mlp_tap is not None
        # Hooks may come and go within a step: reductions watch the last backward's layers.
        watched = bool(hooks_of(layer.module for layer in self.layers))
        return GraphForm(len(hidden), taps_mlps, placed, self._handed and not watched)

    def _place(self, length: int, *, passes: bool) -> int:
        """Positions on this rank of the place of a segment with so many. Those that soon give
        theirs back share that of the step's longest."""
        place = place_of(length * self._ranks, self.most)
        return (max(place, self._needs.longest) if passes else place) // self._ranks

    def _unused(self, place: int, form: GraphForm, *, passes: bool) -> SegmentGraphs | None:
        """A set that nobody has, of so many positions: if there is one, with graphs of a form, and
        with few others, which other segments may ask for."""
        fits = [g for g in self._free if (g.passes, g.most) == (passes, place)]
        if not fits:
            return None
        chosen = max(fits, key=lambda g: (g.covering(form) is not None, -len(g.made)))
        self._free.remove(chosen)
        return chosen

    def _captured(
        self, graphs: SegmentGraphs, form: GraphForm, hidden: Tensor, arguments: Mapping[str, Any]
    ) -> bool:
        why, number = "", 0
        try:
            with torch.enable_grad():
                self.captured += graphs.capture(form, hidden, arguments)
        except Exception as problem:  # noqa: BLE001 - whatever it is, layers run without graphs
            cuda.recover()
            why = (str(problem) or type(problem).__name__).splitlines()[0]
            if graphs.at is not None and not isinstance(problem, torch.OutOfMemoryError):
                number = 1 + graphs.at.number
        failed, number = self._most_of_ranks(bool(why), number)
        if failed:
            why = why or "another tensor-parallel rank could not capture its layers"
            if number == 0 or form.placed is None or not self._left_outside(why, number - 1):
                self._give_up(why, number - 1)
            return False
        self._addresses, self.captures = self._current_addresses(), self.captures + 1
        logger.info(
            "CUDA graphs: %d layers captured for segments of up to %d positions",
            len(self.layers),
            len(hidden),
        )
        return True

    def _left_outside(self, why: str, number: int) -> bool:
        """Whether layers like the one with a number had their cores in graphs, and are cut there
        from now on."""
        alike, of = self._alike(number)
        chosen = [layer for layer in alike if layer.inside]
        for layer in chosen:
            layer.inside, layer.before = None, 0
        if chosen:
            self._free.clear()
            self.layers = [*self.layers]  # another list: sets that segments have now are dropped
            logger.warning("layers of %s run their cores without CUDA graphs: %s", of, why)
        return bool(chosen)

    def _give_up(self, why: str, number: int) -> None:
        """Nothing more is captured of layers like the one with a number; of none if it is -1."""
        alike, of = self._alike(number)
        self.layers = [layer for layer in self.layers if alike and layer not in alike]
        self._inside = Inside(self.layers)
        self._free.clear()
        self._follow()
        if not self.layers:
            self.refused = why
        logger.warning(
            "layers%s run without CUDA graphs: %s", f" of {of}" if self.layers else "", why
        )

    def _alike(self, number: int) -> tuple[list[CutLayer], str]:
        """Layers like the one with a number, and what they are; none if none has it. Those inside
        multi-token prediction may be given other arguments than those of the decoder."""

        def what(layer: CutLayer) -> tuple[Any, bool]:
            return layer.kinds, 0 < self.further <= layer.number

        for asked in self.layers:
            if asked.number == number:
                kinds, is_further = what(asked)
                names = " and ".join(kind.name for kind in kinds if kind)
                names += " inside multi-token prediction" if is_further else ""
                return [layer for layer in self.layers if what(layer) == what(asked)], names
        return [], ""


def _are_others(hooks: Iterable[Any]) -> bool:
    """Whether any of the hooks in layers would be left out by a replay: those with which Megatron's
    DDP waits for weights (overlap_param_gather), or somebody's own. Ours are around cores
    (run/read/random_numbers.py), which no graph has."""
    return any(package(hook) != "megatron_prefix" for hook in hooks)


def _leave(context: SegmentContext, layers: Sequence[int]) -> None:
    """Behind the backward of layers whose cores are in graphs."""
    for layer in reversed(layers):
        if context.inner:
            context.cache.consume(layer, context.index)
        context.leave(layer, backward=True)
