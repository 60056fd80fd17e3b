"""CUDA graphs as a part of steps: which segments may have them, and what that is worth."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_prefix.device.memory import counts_bytes
from megatron_prefix.features.graphs import cuda
from megatron_prefix.features.graphs.choice import (
    GraphChoice,
    Held,
    Needs,
    SeenSegments,
    flops,
    longest_waiting,
    with_graphs,
)
from megatron_prefix.features.graphs.kinds import inside_form
from megatron_prefix.features.graphs.layers import LayerGraphs, why_not
from megatron_prefix.features.graphs.placed_arenas import PlacedArenas
from megatron_prefix.features.graphs.placed_runs import placed_runs
from megatron_prefix.layers import table
from megatron_prefix.layers.kind import Part
from megatron_prefix.layers.model import layers_of
from megatron_prefix.layers.releases import transformer_layers
from megatron_prefix.megatron.install import Hooks, installed
from megatron_prefix.parts import Attempt, StepPart, TimedStep
from megatron_prefix.run.agreement import all_say, first_says
from megatron_prefix.run.execute.memory_control import free_memory
from megatron_prefix.tree.payload_map import Form, PayloadMap

if TYPE_CHECKING:
    from megatron_prefix.plan.actions import Plan
    from megatron_prefix.plan.cost import CostModel
    from megatron_prefix.plan.gate import Decision
    from megatron_prefix.plan.memory import Footprint, RankMemory
    from megatron_prefix.run.report import StepReport
    from megatron_prefix.run.request import Request
    from megatron_prefix.sidecar.row_exchange import RowExchange

logger = logging.getLogger(__name__)
_CHOICE, _RAN, _ARENAS, _CAPTURED = "choice", "ran", "arenas", "captured"
_HELD, _TIMED, _RESERVED, _LENT = "held", "timed", "reserved", "lent"
_STAYED, _MADE, _TRIED = "stayed", "made", "tried"
ROOM = 1.08
"""Of what graphs hold, what is planned for: captures leave gaps in torch's memory."""
MOST_MADE = 4
"""Steps in a row that make graphs anew, as the stock schedule has run before, until there are no
more."""
MOST_TRIED, SLOWER = 8, 1.5
"""Steps that share only so that it is known whether graphs are worth trying, and what they may take
of the stock schedule's time."""
COPIES = 3
"""Hidden states a position that a segment keeps in front of graphs and behind them."""
TIMED = 3
"""Shared steps with graphs that are timed, once their use is settled."""
MOST_CAPTURED = 4
"""Timed steps in which graphs are captured and which are left out for that: where all steps have
some, it is part of what they take."""


class Graphs(StepPart):
    """CUDA graphs in one call."""

    _graphs: Sequence[LayerGraphs] = ()  # of the attempt that runs, or ran last
    _has_begun = False

    @property
    def choice(self) -> GraphChoice:
        """What is known of their use; the same on all ranks."""
        if _CHOICE not in self.kept:
            self.kept[_CHOICE] = GraphChoice.of(self.config.graph_tokens)
        choice: GraphChoice = self.kept[_CHOICE]
        return choice

    @functools.cached_property
    def _layers(self) -> tuple[Any, list[tuple[Any, ...]]]:
        """The model's config, and what fills the slots of each layer."""
        config = table.with_module_fields(self.rank.config, self.rank.language_models)
        return config, layers_of(config, self.rank.model.pattern)

    @functools.cached_property
    def even(self) -> int:  # type: ignore[override]
        """See StepPart: of the longest segment whose layers run on graphs; 0 where they cannot; a
        warning says once why."""
        if not (tokens := self.choice.tokens):
            return 0
        if counts_bytes(self.rank.device) and not self.kept.get(_RAN):
            return 0  # what segments keep without graphs is measured once, or no limit is known
        if self._why_not:
            _warn_once(f"layers run without CUDA graphs: {self._why_not}")
            return 0
        return tokens

    @functools.cached_property
    def _why_not(self) -> str:
        """Why no layer runs on graphs; "" if nothing is known to be in the way."""
        collectives = self.rank.config.tensor_model_parallel_size > 1
        device = cuda.why_not(self.rank.device, collectives=collectives)
        return device or why_not(*self._layers)

    def footprint(self, footprint: Footprint) -> Footprint:
        """See StepPart. Before it is known what graphs hold, as much as segments without."""
        if self.rank.forward_only or not self.even:
            return footprint
        held: Held = self.kept.get(_HELD, Held())
        act, copies = footprint.act / footprint.parts, COPIES * footprint.message
        known = [size * footprint.parts for size in held.of_all(act)]
        if not any(known):
            pool = max((of.wave for of in footprint.stages), default=0.0)
            return replace(footprint, pool=ROOM * pool, pool_length=self.even, spared=pool)
        pool, inner = (size or max(known) for size in known)
        # Layers with graphs are those that inner segments run whole.
        kept = (max(0.0, of.inner - copies) for of in footprint.stages)
        spared, placed = min(pool, inner, *kept), ROOM * inner
        return replace(
            footprint, pool=ROOM * pool, pool_length=self.even,
            spared=spared, placed=placed, cache_least=held.arenas * len(self.rank.models),
        )  # fmt: skip

    def decided(self, decision: Decision) -> Decision:
        """See StepPart. Where the host sets the pace sharing may only pay with graphs, which are
        chosen by steps that share: a few do that take little longer."""
        ratio = decision.predicted_speedup / self.config.min_speedup
        number = self.kept.get(_TRIED, 0)
        if decision.share or number >= MOST_TRIED or not self.choice.tries or self._why_not:
            return decision
        if self.config.mode != "auto" or ratio * SLOWER < 1:
            return decision
        self.kept[_TRIED] = number + 1
        reason = f"predicted speedup {decision.predicted_speedup:.2f}: CUDA graphs may be faster"
        return replace(decision, share=True, fallback=False, reason=reason)

    def times(self, times: CostModel) -> CostModel:
        """See StepPart. Where graphs are tried, segments are planned for them: shorter ones, of
        which more can be kept."""
        return with_graphs(times) if self.even and self._num_timed < TIMED else times

    @property
    def _num_timed(self) -> int:
        """Steps with graphs that were timed, since their use is settled."""
        number: int = self.kept.get(_TIMED, 0)
        return number

    @contextlib.contextmanager
    def around_run(self, report: StepReport, request: Request) -> Iterator[None]:
        """See StepPart. Sees whether torch holds less than behind the last step, though graphs did
        not go for a step of the stock schedule."""
        went = self.kept.get(_STAYED, False) and not self._stay
        lent = cuda.reserved_bytes(self.rank.device) < self.kept.get(_RESERVED, 0) and not went
        self.kept[_LENT] = self.kept.get(_LENT, False) or lent
        yield
        self.kept[_RESERVED] = cuda.reserved_bytes(self.rank.device)
        self.kept[_STAYED] = self._stay

    @property
    def _stay(self) -> bool:
        """Whether model chunks have graphs."""
        return any(map(graphs_of, self.rank.models))

    def prepare(self, plan: Plan, predicted: Callable[[], RankMemory]) -> None:
        """See StepPart."""
        self._chunks = itertools.count()
        if not self.even:
            self.kept.pop(_ARENAS, None)
        elif self._has_begun:
            for arenas in self._arenas:
                arenas.give_back()

    @property
    def _arenas(self) -> list[PlacedArenas]:
        """Of each model chunk."""
        created = [PlacedArenas() for _ in self.rank.models]
        arenas: list[PlacedArenas] = self.kept.setdefault(_ARENAS, created)
        return arenas

    def arenas(
        self, planned: PayloadMap, forms: Sequence[Form], exchange: RowExchange | None
    ) -> PlacedArenas | None:
        """See StepPart: those whose places graphs know."""
        has_others = exchange is not None or self.config.cache_host_layers
        if not self.even or self.rank.forward_only or has_others:
            return None
        chunk = next(self._chunks)
        inside = self._inside(chunk)
        rows = {form: planned.rows(form).length for form in inside}
        if Form.POSITIONS in inside:
            rows |= {form: tail.length for form, (tail, _) in planned.tails.items()}
        return self._arenas[chunk].begin(forms, rows)

    def _inside(self, chunk: int) -> set[Form]:
        """What mixers of a model chunk leave whose cores may be in graphs."""
        hooks = installed(self.rank.models[chunk])
        if hooks is None or not placed_runs(hooks, self.rank.device):
            return set()
        return {form for mixer, _ in hooks.slots if (form := inside_form(mixer)) is not None}

    def begin(self, attempt: Attempt) -> None:
        """See StepPart: before another attempt what graphs hold is given back: as much as all
        segments keep that had some at once, while the leaner plan is to hold one of them."""
        stayed = self._stay
        created = [self._of(stage.hooks) for stage in attempt.stages]
        self.kept[_MADE] = self.kept.get(_MADE, 0) + (self._stay and not stayed)
        self._graphs = [graphs for graphs in created if graphs is not None]
        plan = attempt.plan
        policies = map(plan.policy, range(len(plan.segments)))
        recomputed = {index for index, policy in enumerate(policies) if policy == "recompute"}
        for stage, graphs in zip(attempt.stages, created, strict=True):
            if graphs is not None:
                if self._has_begun:
                    graphs.drop_sets()
                needs = Needs.of(plan, self.even)
                graphs.begin_step(recomputed, self._arenas[stage.chunk], needs)
        if self._has_begun:
            free_memory()
        self._has_begun = self.kept[_RAN] = True

    def _of(self, hooks: Hooks) -> LayerGraphs | None:
        """Of the layers of a model chunk, for segments of up to `even` positions. The last layer of
        the last stage runs on what is read."""
        graphs: LayerGraphs | None = hooks.kept.get(Graphs)
        further = 2 * len(hooks.model.decoder.layers) if hooks.predicts_further else 0
        if graphs is not None and (graphs.most, graphs.further) == (self.even, further):
            return graphs
        if graphs is not None:
            graphs.drop_sets()
        hooks.keep(Graphs, None)
        if not self.even:
            return None
        ranks = self.rank.model.sequence_ranks * self.rank.config.context_parallel_size
        # Others' may add to what layers give each other, as some vision-language models' do.
        handed = type(hooks.model.decoder).forward.__module__.startswith("megatron.core.")
        group = hooks.model.pg_collection.tp
        layers = numbered_layers(hooks)
        graphs = LayerGraphs(layers, hooks, self.even, ranks, group, handed, further=further)
        hooks.keep(Graphs, graphs, graphs.overrides())
        return graphs

    def freed(self, segment: int, chunk: int) -> None:
        """See StepPart."""
        if self._graphs:
            self._graphs[chunk].release(segment)

    def end(self) -> None:
        """See StepPart."""
        for graphs in self._graphs:
            graphs.end_step()
            if graphs.used and not graphs.captured:
                self.kept[_MADE] = 0

    @property
    def is_tuning(self) -> bool:  # type: ignore[override]
        """See StepPart. Some steps with graphs are timed, so that plans know what launches take."""
        if self._why_not:
            return False
        return self.choice.is_open or (self.choice.tokens > 0 and self._num_timed < TIMED)

    @property
    def holds_memory(self) -> bool:  # type: ignore[override]
        """See StepPart."""
        return self.even > 0

    def timed(self, step: TimedStep) -> bool:
        """See StepPart. Chooses the use of graphs from the next step on, alike on all ranks. Times
        of a step that shared while graphs are tried count only if they stay."""
        before, observed = self.choice, self._seen(step)
        for group in step.groups:
            observed = SeenSegments.most(all_say(observed, group))
        is_known = any(self.kept.get(_HELD, Held()).of_all(0.0))  # when the step was planned
        self.learn(observed.held)
        if observed.is_lent and before != (before := before.lent()):
            logger.info(
                "no CUDA graphs: between steps others, or the stock schedule, need their memory"
            )
            self.kept[_CHOICE] = before
        if not before.is_open:
            has_room = not (observed.needs_room or observed.retried)
            self._choose(before, before.settled(has_room=has_room))
            typical = not before.tokens or self._is_typical(observed.captured > 0)
            counts = typical and observed.shared
            self.kept[_TIMED] = self._num_timed + counts
            self.renews = counts and self._num_timed == 1  # launches took longer without graphs
            return typical
        after = self._after(before, step, observed, is_known)
        self._choose(before, first_says(after, step.groups))
        stay = self.choice.tokens > 0 and not self.choice.is_open
        return stay or not (before.tokens and observed.shared)

    def _choose(self, before: GraphChoice, choice: GraphChoice) -> None:
        self.kept[_CHOICE] = choice
        if choice.tokens != before.tokens:
            logger.info("graph_tokens is %d from the next step on", choice.tokens)

    def _after(
        self, choice: GraphChoice, step: TimedStep, counts: SeenSegments, is_known: bool
    ) -> GraphChoice:
        """The use of graphs from the next step on. While the first steps are measured there are
        none: a capture is no time of a step. `is_known`: whether it was planned with what graphs
        hold."""
        if choice.tokens and (counts.needs_room or counts.retried):
            return choice.without_room(retried=counts.retried, known=is_known)
        work = flops(step.report.plan, self.rank.model.cost)
        if not (step.report.decision.share and step.predicted > 0 and work > 0):
            return choice
        ratio = (step.seconds - counts.captured) / work
        may_try = step.is_settled and not self._why_not
        captured = counts.captured > 0
        return choice.after(
            ratio, counts.waits, may_try=may_try, captured=captured, used=counts.used
        )

    def _is_typical(self, captured: bool) -> bool:
        """Whether a step's time counts, where graphs are used in any case."""
        number = self.kept.get(_CAPTURED, 0)
        self.kept[_CAPTURED] = number + captured
        return not captured or number >= MOST_CAPTURED

    def _seen(self, step: TimedStep) -> SeenSegments:
        report, waits = step.report, 0
        if step.times is not None and report.decision.share and not report.retried:
            # In forwards of experts the host reads from the device how many tokens each gets.
            without_waiting = "B" if self.rank.model.has_experts else "F"
            times = step.times.seconds(), step.times.host_seconds()
            waits = longest_waiting(report.plan, *times, without_waiting)
        captured = sum(graphs.captured for graphs in self._graphs)
        used = any(graphs.used for graphs in self._graphs)
        lent = self.kept.get(_LENT, False) or self.kept.get(_MADE, 0) >= MOST_MADE
        no_room = report.decision.over_limit, report.retried
        counts = report.decision.share, waits, captured, used, *no_room
        return SeenSegments(*counts, self._held(), lent)

    def _held(self) -> Held:
        """Of this rank; a snapshot of the allocator takes milliseconds."""
        if self.rank.device.type != "cuda":
            return Held()
        return Held.most(graphs.held for graphs in self._graphs)

    def learn(self, held: Held) -> None:
        """Later steps are planned with what graphs hold; the same on all ranks."""
        known = self.kept.get(_HELD, Held())
        rates = Held(*(new or old for new, old in zip(held, known, strict=True)))
        self.kept[_HELD] = rates._replace(arenas=held.arenas)  # which may have been given back


def numbered_layers(hooks: Hooks) -> Iterator[tuple[int, Any, Sequence[Part]]]:
    """Layers that may have graphs, with their numbers and what fills their slots. The last layer of
    the last stage runs on what is read, so it has none. Layers inside multi-token prediction are
    given what others have made in between, so their numbers do not follow each other. One that runs
    several times has none; nor have they with `fp32_residual_connection`, where what they are given
    may have another dtype than the decoder's hidden states, for which places are made."""
    layers, num = transformer_layers(hooks.model), len(hooks.model.decoder.layers)
    turns, is_wider = Counter(map(id, layers)), hooks.model.config.fp32_residual_connection
    for place, (layer, parts) in enumerate(zip(layers, hooks.slots, strict=True)):
        if place < num and (hooks.keys_only is None or place < num - 1):
            yield place, layer, parts
        elif place >= num and hooks.predicts_further and turns[id(layer)] == 1 and not is_wider:
            yield 2 * place, layer, parts


def graphs_of(model: Any) -> LayerGraphs | None:
    """Of the layers of a model chunk, wrapped or not; None without."""
    hooks = installed(model)
    graphs: LayerGraphs | None = None if hooks is None else hooks.kept.get(Graphs)
    return graphs


@functools.cache
def _warn_once(text: str) -> None:
    """Once for each text."""
    logger.warning(text)
