"""Device memory of every rank of a pipeline in one step, by numbers that were measured.  Pure.

Goes through a rank's program action by action. A forward adds what the segment's policy keeps. The
first live inner segment adds the arenas of K/V, the first backward that reads them those of gK/gV;
the last one frees both. A backward adds for its duration what it recomputes or loads, then frees
its segment. Weights, their gradients and the optimizer are not counted.

How much a position takes is measured (run/costs.py); what a span leaves in the sidecar
every kind of layer says (layers/kind.py, `payload`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.layer_numbers import Payload
from megatron_prefix.plan.sizes import ArenaSizes, SegmentSizes, StageBytes
from megatron_prefix.tree.payload_map import Arenas, Form
from megatron_prefix.tree.views import LevelKeys, Views, views_of

MESSAGES = 4
"""Receives posted ahead and sends under way, both directions together (run/execute/messages.py)."""
PARTICLE = 2.0**-12
"""Of a byte. What segments keep is a multiple of it, so sums up to 2 TiB are exact, in whatever
order."""


class Buffers(Protocol):
    """Memory of further messages of a model chunk, beyond those between stages, while its program
    runs."""

    @property
    def crosses(self) -> bool:
        """Whether there are any."""
        ...

    @property
    def held(self) -> float:
        """Bytes."""
        ...

    def post(self, action: Action) -> None:
        """Allocates buffers of messages that start with an action."""
        ...

    def take(self, action: Action) -> None:
        """Frees buffers of messages that an action waits for."""
        ...


BuffersOf = Callable[["Plan", int, int, "Messages", Callable[[int], Collection[int]]], Buffers]


class Messages(Protocol):
    """What buffers ask of a footprint: see there."""

    @property
    def payloads(self) -> Sequence[Sequence[Payload]]: ...
    @property
    def parts(self) -> int: ...
    @property
    def shares(self) -> int: ...
    @property
    def state(self) -> float: ...
    @property
    def state_grad(self) -> float: ...


@dataclass(frozen=True)
class RankMemory:
    """One rank's peak, in bytes, besides weights and gradients.

    Attributes:
        peak: largest sum.
        action: at the peak.
        kept, cache, moment: the parts of `peak`: what segments keep; K/V and gK/gV; messages and
            what the action has for its duration.
        held: at the peak, (segment, bytes) of segments between forward and backward.
        cache_peak, cache_staged: largest K/V and gK/gV on the device, and on the host.
        staged: largest offloaded segments on the host.
        exchanged: largest buffers of further messages.
    """

    peak: float
    action: Action
    kept: float = 0.0
    cache: float = 0.0
    moment: float = 0.0
    held: tuple[tuple[int, float], ...] = ()
    cache_peak: float = 0.0
    cache_staged: float = 0.0
    staged: float = 0.0
    exchanged: float = 0.0


class PlanBytes(Protocol):
    """Memory of a plan with any policies, `()` where all retain."""

    def peaks(self, policies: tuple[str, ...]) -> tuple[RankMemory, ...]:
        """Of every rank of the plan's pipeline."""
        ...

    def saved(self, policies: tuple[str, ...]) -> Sequence[float]:
        """Per segment the bytes that layers of a rank save if its policy leaves that on the device;
        of the stage that saves most."""
        ...


class MemoryModel(Hashable, Protocol):
    """What says how much memory a plan takes: measured numbers, or others in their place."""

    @property
    def parts(self) -> int: ...
    @property
    def act(self) -> float: ...

    def of(self, plan: Plan) -> PlanBytes:
        """Memory of a plan; its own policies are ignored."""
        ...

    def peaks(self, plan: Plan) -> tuple[RankMemory, ...]:
        """Of every rank of a plan's pipeline."""
        ...


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model on the ranks of one pipeline, a position unless said otherwise.

    Attributes:
        stages: measured, by stage; zeros where nothing is known yet.
        payloads: of every stage, those of its layers that leave one.
        message: between two stages.
        layers: of a model chunk.
        parts: context-parallel ranks, which share the positions.
        shares: into how many parts K/V and gK/gV of inner segments are cut; a rank has one.
        act: of what a stage keeps, what policy "recompute_act" drops.
        host_layers: see PrefixConfig.cache_host_layers.
        state, state_grad: a final hidden state that crosses data-parallel ranks, and its gradient.
        pool, pool_length: segments of up to `pool_length` positions are computed in places that
            stay from step to step (`place_of`). Inner segments that do not run again have one each.
            Waves, and segments that run again, take turns: a model chunk has as many places for
            them as are in use at once, each as long as the longest needs, with `pool` bytes a
            position. 0: none.
        spared: of what a segment keeps, what it keeps there.
        placed: bytes a position of an inner segment's own place; 0: not known, so all that it keeps
            is taken to be there.
        cache_least: bytes of a rank's arenas that stay from step to step.
        buffers: makes those of a plan, a rank, its model chunk and a footprint, with what says
            which segments a segment reads; None: there are no further messages.
    """

    stages: tuple[StageBytes, ...]
    payloads: tuple[tuple[Payload, ...], ...]
    message: float
    layers: int
    parts: int = 1
    shares: int = 1
    act: float = 0.0
    host_layers: int = 0
    state: float = 0.0
    state_grad: float = 0.0
    pool: float = 0.0
    pool_length: int = 0
    spared: float = 0.0
    placed: float = 0.0
    cache_least: float = 0.0
    buffers: BuffersOf | None = None

    def of(self, plan: Plan) -> PlanMemory:
        """See MemoryModel."""
        return _plan_memory(replace(plan, policies=()), self)

    def peaks(self, plan: Plan) -> tuple[RankMemory, ...]:
        """See MemoryModel."""
        return self.of(plan).peaks(plan.policies)


class PlanMemory:
    """Memory of all ranks in every action of a plan, with any policies.

    Arrays are [ranks, actions of a rank]. What policies do not change is made once; what they
    change is a running sum.

    Attributes:
        positions: of every action's segment, which the stage's `moment` is multiplied by.
    """

    def __init__(self, plan: Plan, footprint: Footprint) -> None:
        self._plan, self._footprint, programs = plan, footprint, plan.programs
        self._back = np.array([[kind == "B" for kind, *_ in each] for each in programs], bool)
        self._segment, self._chunk = (
            np.array([[action[n] for action in each] for each in programs], np.int64)
            for n in (1, 2)
        )
        self._stage = self._chunk * plan.num_ranks + np.arange(plan.num_ranks)[:, None]
        # Of every forward the place of its backward; a segment on a chunk has one of each.
        pairs = (self._chunk * len(plan.segments) + self._segment).argsort(1, kind="stable")
        self._until = np.full(pairs.shape, -1)
        np.put_along_axis(self._until, pairs[:, ::2], pairs[:, 1::2], 1)
        views = views_of(plan.segments, footprint.parts)
        self._segments = SegmentSizes(plan, footprint, views)
        self._inner = self._segments.inner[self._segment]
        self.positions = self._segments.computed[self._segment]
        self._add_arenas(views)
        self._posted, self._exchanged = self._buffers(views)
        positions, stages = self._segments.positions, footprint.stages
        before = np.array([of.before for of in stages]).reshape(-1, plan.num_ranks).max(0)
        self._before = positions.sum() * before[:, None]
        messages = MESSAGES * footprint.message * positions.max(initial=0.0)
        self._messages = messages if plan.num_ranks > 1 else 0.0

    def _add_arenas(self, views: Sequence[Views]) -> None:
        """What is in the arenas during every action, and what an action has of them for its
        duration: gradients of the ancestors' rows that it reads at once, two layers' K/V if these
        are gathered from other ranks, and layers on the host."""
        plan, footprint, num_ranks = self._plan, self._footprint, self._plan.num_ranks
        arenas = Arenas(plan.segments, footprint.shares)
        keys = LevelKeys(plan.segments, views, footprint.shares)
        rows, longest = list[dict[Form, int]](), []
        for chunk, rank in itertools.product(range(plan.num_chunks), range(num_ranks)):
            on = self._inner[rank] & (self._chunk[rank] == chunk)
            names = np.where(self._back[rank][on], "B", "F").tolist()
            program = [*zip(names, self._segment[rank][on].tolist(), strict=True)]
            payloads = footprint.payloads[len(rows)]
            forms = {Form.POSITIONS, *(payload.form for payload in payloads)}
            planned = {form: arenas.allocated(form, program) for form in forms}
            rows.append({form: of_form.length for form, of_form in planned.items()})
            longest.append(keys.most(planned[Form.POSITIONS].intervals))
        stages = ArenaSizes(footprint, rows)
        own = stages.a_position * (np.array(longest, np.float64) * footprint.shares)
        if footprint.shares > 1:
            own += 2 * stages.gathered * (np.array(keys.total) * footprint.shares)
        visits = self._segments.reads | self._segments.inner
        own += stages.visited * visits
        moment = np.array([numbers.moment for numbers in footprint.stages])[self._stage]
        self._computing = moment * self.positions + np.where(
            self._back, self._at(own + stages.visited_back * visits), self._at(own)
        )
        self._cache, self._host, self._late = (np.zeros(self._stage.shape) for _ in range(3))
        for chunk in range(plan.num_chunks):
            live, returned, is_first = self._arena_states(self._chunk == chunk)
            of_chunk = slice(chunk * num_ranks, (chunk + 1) * num_ranks)
            self._cache += stages.values[of_chunk] * live + stages.gradients[of_chunk] * returned
            self._host += (
                stages.host_values[of_chunk] * live + stages.host_gradients[of_chunk] * returned
            )
            self._late += stages.late[of_chunk] * is_first
        self._cache = np.maximum(self._cache, footprint.cache_least)
        self._late *= footprint.cache_least == 0  # what stays is there before its first gradient

    def _arena_states(self, on: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], ...]:
        """For the actions of a model chunk, flags of every action: K/V are there, gK/gV are there;
        the action adds gK/gV layer by layer, while the saved tensors of its segment are freed, as
        it reads no other segment's."""
        forwards, backwards = on & ~self._back, on & self._back
        ended = backwards & self._inner
        num_live = (forwards & self._inner).cumsum(1) - ended.cumsum(1)  # after the action
        returns = backwards & self._segments.reads[self._segment]
        place = np.arange(on.shape[1])
        returned = np.maximum.accumulate(np.where(returns, place, -1), 1)
        freed = np.maximum.accumulate(np.where(backwards & (num_live <= 0), place, -1), 1)
        freed, before = (
            np.pad(places, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
            for places in (freed, returned)
        )
        is_first = returns & (before <= freed)
        is_first &= ~self._segments.reads_others[self._segment]
        return num_live + ended > 0, returned > freed, is_first

    def _buffers(self, views: Sequence[Views]) -> tuple[NDArray[np.float64], ...]:
        """Bytes of buffers before every action waits for its messages, and after."""
        plan, make = self._plan, self._footprint.buffers
        held = np.zeros((2, *self._stage.shape))
        if make is None:
            return held[0], held[1]
        for rank, program in enumerate(plan.programs):
            chunks = [
                make(plan, rank, chunk, self._footprint, lambda index: views[index].segments)
                for chunk in range(plan.num_chunks)
            ]
            for place, action in enumerate(program if any(of.crosses for of in chunks) else ()):
                chunks[action.chunk].post(action)
                held[0, rank, place] = sum(of_chunk.held for of_chunk in chunks)
                chunks[action.chunk].take(action)
                held[1, rank, place] = sum(of_chunk.held for of_chunk in chunks)
        return held[0], held[1]

    def _at(self, values: NDArray[Any]) -> NDArray[Any]:
        """Of every action the value of its stage and segment."""
        return values[self._stage, self._segment]

    def _running(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """What there is during every action, if a forward adds a value and its backward ends it."""
        values = np.rint(values / PARTICLE) * PARTICLE
        change = np.where(self._back, 0.0, values)
        change[:, 1:] -= np.where(self._back, values, 0.0)[:, :-1]
        return change.cumsum(1)

    def _pool(self, places: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes of the pools of every rank's model chunks, [ranks, 1]; `places`: of segments."""
        inside, inner = (places > 0)[self._segment], self._inner
        chunks = (self._chunk == chunk for chunk in range(self._plan.num_chunks))
        taken = [self._running(inside & ~inner & on) + (inside & inner & on) for on in chunks]
        return places.max() * sum(of_chunk.max(1, keepdims=True) for of_chunk in taken)

    def _names(self, policies: tuple[str, ...]) -> NDArray[Any]:
        return np.array(policies or ("retain",) * len(self._plan.segments), object)

    def saved(self, policies: tuple[str, ...]) -> list[float]:
        """See PlanBytes."""
        saved = self._segments.saved(self._names(policies) == "recompute_act")
        return (saved.max(0) * self._plan.num_chunks).tolist()

    def loads(self, policies: tuple[str, ...]) -> Loads:
        """Bytes during every action."""
        policy, segments = self._names(policies), self._segments
        saved, away = segments.saved(policy == "recompute_act"), policy == "offload"
        pooled, places = segments.pooled(policy)
        saved = np.maximum(saved - pooled, np.minimum(saved, segments.scored_bytes))
        own = self._at(segments.kept(saved, policy))
        again = self._at(segments.again(saved, policy)) * (self._back | away[self._segment])
        # Received payloads are in the sidecar before the action computes.
        at_once = np.maximum(again + self._computing + self._exchanged, self._posted)
        moment = self._messages + at_once - np.minimum(self._late, own)
        staged = self._running(self._at((saved - segments.scored_bytes) * away))
        before = self._before + (self._pool(places) if places.any() else 0.0)
        return Loads(before + self._running(own), self._cache, moment, own, staged)

    def peaks(self, policies: tuple[str, ...]) -> tuple[RankMemory, ...]:
        """See PlanBytes."""
        if not self._stage.size:
            return (RankMemory(0.0, Action("F", 0)),) * self._plan.num_ranks
        loads = self.loads(policies)
        used, exchanged = loads.used, np.maximum(self._posted, self._exchanged)
        largest = (self._cache, self._host, loads.staged, exchanged)
        peaks = []
        for rank, place in enumerate(used.argmax(1).tolist()):
            peak, kept, cache, moment = (float(n[rank, place]) for n in (used, *loads[:3]))
            held, most = self._held(loads, rank, place), (float(n[rank].max()) for n in largest)
            action = self._plan.programs[rank][place]
            peaks.append(RankMemory(peak, action, kept, cache, moment, held, *most))
        return tuple(peaks)

    def _held(self, loads: Loads, rank: int, place: int) -> tuple[tuple[int, float], ...]:
        """(segment, bytes) of segments between forward and backward during an action."""
        places = np.flatnonzero(self._until[rank, : place + 1] >= place)
        sizes = loads.own[rank, places].tolist()
        return tuple(zip(self._segment[rank, places].tolist(), sizes, strict=True))


_plan_memory = functools.lru_cache(maxsize=16)(PlanMemory)


class Loads(NamedTuple):
    """Bytes of a plan's ranks during every action, [ranks, actions of a rank].

    Attributes:
        kept, cache, moment: as of RankMemory.
        own: what the action's segment keeps.
        staged: offloaded segments on the host.
    """

    kept: NDArray[np.float64]
    cache: NDArray[np.float64]
    moment: NDArray[np.float64]
    own: NDArray[np.float64]
    staged: NDArray[np.float64]

    @property
    def used(self) -> NDArray[np.float64]:
        return self.kept + self.cache + self.moment


def memory_table(plan: Plan, memory: Sequence[RankMemory]) -> str:
    """A table of what every rank holds at its peak, in GiB."""
    lines = ["rank   peak   kept  K/V, gK/gV  moment  at    segments held"]
    for rank, of_rank in enumerate(memory):
        policies = sorted({plan.policy(index) for index, _ in of_rank.held})
        segments = f"{len(of_rank.held)} ({', '.join(policies)})" if of_rank.held else "none"
        numbers = of_rank.peak, of_rank.kept, of_rank.cache, of_rank.moment
        widths = (6, 6, 11, 7)
        row = " ".join(f"{n / 2**30:.2f}".rjust(w) for n, w in zip(numbers, widths, strict=True))
        lines.append(f"{rank:4d} {row}  {of_rank.action!s:5s} {segments}")
    return "\n".join(lines)
