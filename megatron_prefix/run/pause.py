"""Steps that mode "auto" leaves to Megatron's schedule without looking at them, and those in which
data-parallel ranks do not ask one another.

To look at a step costs time: its microbatches are read before anything runs, so the device waits
for the host. Where sharing did not pay, or would have taken too much memory, in `AFTER` training
steps in a row on all ranks that make a step together, none of them looks at the next `STEPS`. To
find what data-parallel ranks have in common takes time on the host, too, and waits for all of them.
"""

from __future__ import annotations

from megatron_prefix.plan.gate import Decision
from megatron_prefix.run.rank import Rank

AFTER, STEPS = 2, 24
"""Training steps."""


class Pause:
    """Counts training steps of one kind in mode "auto"; all ranks that agree on a step count
    alike."""

    def __init__(self) -> None:
        self._in_a_row = self._left = 0

    def note(self, decision: Decision) -> None:
        """Counts a step that was looked at, with this rank's decision."""
        self._in_a_row = self._in_a_row + 1 if decision.fallback else 0

    def wanted(self, rank: Rank) -> bool:
        """Whether this rank would not look at the step. Never where a trainer's groups do not say
        which ranks are data-parallel: they may meet later, without having agreed on this."""
        return rank.data_ranks is not None and self._in_a_row >= AFTER

    def begin(self) -> Decision:
        """The decision for the first step of a pause; all ranks want it."""
        self._in_a_row, self._left = AFTER - 1, STEPS
        return self.next()  # type: ignore[return-value]

    def next(self) -> Decision | None:
        """The decision for a step that nobody looks at; None if it is looked at."""
        if not self._left:
            return None
        self._left -= 1
        reason = (
            f"sharing did not pay in {AFTER} steps, or took too much memory: looks again after"
            f" {STEPS} steps"
        )
        return Decision(False, reason, True, 1.0)


class Rest:
    """Counts steps in which data-parallel ranks asked one another and no prompt crossed; all of
    them count alike."""

    def __init__(self) -> None:
        self._in_a_row = self._left = 0

    def note(self, crosses: bool) -> None:
        """Counts a step in which they asked."""
        self._in_a_row = 0 if crosses else self._in_a_row + 1
        if self._in_a_row >= AFTER:  # after a rest once is enough
            self._in_a_row, self._left = AFTER - 1, STEPS

    def next(self) -> bool:
        """Whether they do not ask in the next step."""
        rests = self._left > 0
        self._left -= rests
        return rests
