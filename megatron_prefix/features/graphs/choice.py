"""Which segments' layers run on CUDA graphs where that is left to measurements, and in sets of what
size.  Pure.

Graphs spare the host launches, and cost copies and memory.  So they are for segments for which the
device was seen to wait for the host, and stay only if steps then take less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.cost import CostModel, Work, works
from megatron_prefix.plan.sizes import place_of

WAITS = 0.9
"""The host's part of an action's time from which on the device waits for it: what it has queued
ends when the host does."""
LEAST = 0.1
"""Such actions' part of all actions' time from which on graphs are tried."""
PAYS = 0.97
"""Of the least time of a step without graphs, what one with them may take at most to keep them, for
as many FLOPs, padding included."""
MOST_LATE = 4
"""Steps in a row that take too long, or have no graphs yet, before the next one decides."""
LAUNCHES = 0.1
"""What an action's launches take with graphs, of what they take without, until that is measured."""
LIGHT = "recompute_act"
"""The policy of segments whose activations alone run again."""
ENOUGH = 2
"""Steps with sharing that are timed before graphs are tried, and then with all of them before they
end."""
NO_ROOM = 2
"""Steps without room for graphs, once their use is settled, until those of shorter segments are
tried."""
SHORTEST = 1024
"""Where there is no room for graphs of longer segments, those of half as long ones are tried, down
to this."""
PARTS = 8
"""Of a power of two: places about as long as the longest segment that waits end at such a part."""


class Held(NamedTuple):
    """Bytes that sets of graphs hold for each of their positions; 0: there are none.

    Attributes:
        pool: sets for segments that soon give them back.
        inner: the others.
        light_pool, light_inner: of either, sets for segments whose activations run again alone.
        arenas: bytes of arenas that stay from step to step.
    """

    pool: float = 0.0
    inner: float = 0.0
    light_pool: float = 0.0
    light_inner: float = 0.0
    arenas: float = 0.0

    def of_all(self, act: float) -> tuple[float, float]:
        """Of sets of both kinds for segments of which nothing runs again, where others save `act`
        bytes a position less."""
        pairs = (self.pool, self.light_pool), (self.inner, self.light_inner)
        pool, inner = (max(size, light and light + act) for size, light in pairs)
        return pool, inner

    @classmethod
    def most(cls, several: Iterable[Held]) -> Held:
        """Of several model chunks, or ranks."""
        return cls(*map(max, zip(cls(), *several, strict=True)))


class SeenSegments(NamedTuple):
    """What a timed step says of CUDA graphs.

    Attributes:
        shared: whether it shared.
        waits: see `longest_waiting`.
        captured: seconds in which some were captured.
        used: whether segments had some.
        needs_room: whether it could not share for want of memory.
        retried: whether it ran twice, for want of memory.
        held: by what there is behind it.
        is_lent: whether memory was returned to the device between steps, for others.
    """

    shared: bool
    waits: int
    captured: float
    used: bool
    needs_room: bool
    retried: bool = False
    held: Held = Held()
    is_lent: bool = False

    @classmethod
    def most(cls, several: Iterable[SeenSegments]) -> SeenSegments:
        """Of several ranks."""
        *numbers, held, is_lent = zip(*several, strict=True)
        shared, waits, captured, used, needs_room, retried = map(max, numbers)
        room = needs_room, retried, Held.most(held)
        return cls(shared, waits, captured, used, *room, max(is_lent))


@dataclass(frozen=True)
class GraphChoice:
    """What is known of graphs' use.

    Attributes:
        tokens: positions of the longest segment whose layers run on graphs; 0: none.
        is_open: whether that may still change.
        is_measured: whether it is left to measurements.
        without: times of steps without graphs, over their FLOPs.
        waits: positions of the longest segment seen to wait for the host.
        late: steps with graphs that took too long, or had none yet.
        slow: of these the steps in which all segments had them.
        crowded: steps that had no room for them, since it is settled.
        guessed: positions for which there was no room while what graphs hold was a guess; 0: none.
            The guess is what segments keep without, which for layers of experts is too much.
    """

    tokens: int
    is_open: bool = False
    is_measured: bool = False
    without: tuple[float, ...] = ()
    waits: int = 0
    late: int = 0
    slow: int = 0
    crowded: int = 0
    guessed: int = 0

    @classmethod
    def of(cls, setting: int | str) -> GraphChoice:
        """By the setting `graph_tokens`."""
        if isinstance(setting, str):
            return cls(0, is_open=True, is_measured=True)
        return cls(setting)

    @property
    def tries(self) -> bool:
        """Whether steps without graphs are still to show whether they may be worth something."""
        unknown = len(self.without) < ENOUGH or self.waits > 0
        return self.is_measured and self.is_open and not self.tokens and unknown

    def after(
        self, ratio: float, waits: int, *, may_try: bool, captured: bool = False, used: bool = True
    ) -> GraphChoice:
        """With one more timed step that shared.

        Args:
            ratio: its time over its FLOPs (`flops`).
            waits: see `longest_waiting`.
            may_try: whether graphs may be used from the next step on.
            captured: whether graphs were captured in it, the time of which is left out: others
                of its segments ran without, so if it took too long other steps decide.
            used: whether segments had graphs in it: if not, others decide, too.
        """
        if not self.is_open:
            return self
        if self.tokens:
            if used and ratio <= PAYS * min(self.without):
                return replace(self, is_open=False)
            slow = self.slow + (used and not captured)
            if slow == ENOUGH or self.late == MOST_LATE:
                return self._given_up()
            if self.guessed and used:  # what those hold is known now
                return replace(self, tokens=self.guessed, guessed=0, late=self.late + 1)
            return replace(self, late=self.late + 1, slow=slow)
        counted = replace(self, without=(*self.without, ratio), waits=max(self.waits, waits))
        if may_try and counted.waits and len(counted.without) >= ENOUGH:
            return replace(counted, tokens=power(counted.waits))
        return counted

    def _given_up(self) -> GraphChoice:
        """After steps that took too long. Where room is short, as the odd length says, half as long
        segments leave more of it, and plans differ."""
        half = power(self.tokens) // 2
        if self.tokens == half * 2:
            return replace(self, is_open=False, tokens=0)
        return replace(self, tokens=half, late=0, slow=0)

    @property
    def _shorter(self) -> int:
        """Of the next shorter places: first those that just hold what waits, then powers of two."""
        step = max(1, power(self.waits) // PARTS)
        close, half = -(-self.waits // step) * step, power(self.tokens) // 2
        return close if half < close < self.tokens else half

    def without_room(self, *, retried: bool = False, known: bool = True) -> GraphChoice:
        """After a timed step that could not share for want of memory, which graphs hold: shorter
        places are tried, which hold less. If there are none, or a step ran twice, they end.

        Args:
            retried: whether it ran twice.
            known: whether some were captured before, so that it was planned with what they hold.
        """
        if not (self.is_open and self.tokens):
            return self
        if retried or self.tokens <= SHORTEST:
            return replace(self, is_open=False, tokens=0)
        guessed = self.guessed or (0 if known or self._shorter >= self.waits else self.tokens)
        return replace(self, tokens=self._shorter, guessed=guessed)

    def settled(self, *, has_room: bool) -> GraphChoice:
        """With one more step, where it is settled: later ones may need more memory than the step
        that settled it, before which nobody knew what graphs hold."""
        if has_room or self.is_open or not (self.is_measured and self.tokens):
            return self
        if self.crowded + 1 < NO_ROOM:
            return replace(self, crowded=self.crowded + 1)
        return replace(self, is_open=True, late=0, slow=0, crowded=0).without_room()

    def lent(self) -> GraphChoice:
        """Where others use the device between steps: what graphs hold would be in their way."""
        return replace(self, is_open=False, tokens=0) if self.is_measured else self


class Needs(NamedTuple):
    """Of graphs in a step, by `place_of`.

    Attributes:
        longest: positions of the place of the longest segment that soon gives its set back.
        plain: of the longest of them of which more than activations runs again, or nothing.
        kept: places of segments that keep theirs from their forward to their backward.
        kept_plain: whether more than activations of one of them runs again, or nothing.
    """

    longest: int
    plain: int = 0
    kept: tuple[int, ...] = ()
    kept_plain: bool = False

    @classmethod
    def of(cls, plan: Plan, most: int) -> Needs:
        """Of a plan whose segments of up to `most` positions have graphs."""
        passing, plain, kept, kept_plain = [0], [0], [], False
        for number, segment in enumerate(plan.segments):
            if segment.source < 0 and segment.padded_length <= most:
                policy, place = plan.policy(number), place_of(segment.padded_length, most)
                is_plain = policy != LIGHT
                if segment.inner and policy != "recompute":
                    kept.append(place)
                    kept_plain |= is_plain
                else:
                    passing.append(place)
                    plain.append(place * is_plain)
        return cls(max(passing), max(plain), tuple(kept), kept_plain)


def power(number: int) -> int:
    """So many or more, a power of two."""
    return 1 << max(0, number - 1).bit_length()


def with_graphs(times: CostModel) -> CostModel:
    """What work takes if layers run on graphs."""
    forward = Work(1.0, 1.0, 1.0, LAUNCHES, LAUNCHES, 1.0)
    shares = (*forward, *forward)
    prices = (price * share for price, share in zip(times.prices, shares, strict=True))
    return replace(times, prices=tuple(prices))


def flops(plan: Plan, cost: CostModel) -> float:
    """Of forwards of a plan's segments, once each: what steps are compared by whose plans differ in
    how much runs again, or in launches."""
    once = (work._replace(actions=0.0, calls=0.0) for work in works(plan.segments))
    return sum(map(cost.of_work, once))


def longest_waiting(
    plan: Plan, device: Mapping[Action, float], host: Mapping[Action, float], kind: str = "F"
) -> int:
    """Positions of the longest segment in whose actions the device waited for the host; 0 if such
    actions were a small part of the step. Of those that may have graphs: not what another rank
    computes, nor what is offloaded.

    Args:
        plan: of the step.
        device: seconds of its actions on the device, of one rank.
        host: what the host took for them.
        kind: of the actions that are looked at, in which the host waits for nothing itself.
    """
    waited = [
        action
        for action, seconds in device.items()
        if action.kind == kind and host[action] >= WAITS * seconds
        if plan.segments[action.segment].source < 0 and plan.policy(action.segment) != "offload"
    ]
    if sum(device[action] for action in waited) < LEAST * sum(device.values()):
        return 0
    return max((plan.segments[action.segment].padded_length for action in waited), default=0)
