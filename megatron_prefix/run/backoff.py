"""Steps that are left alone for a while, after some for which an effort was of no use.

Mode "auto" leaves steps to Megatron's schedule without looking at them where sharing did not pay,
or would have taken too much memory, in `AFTER` training steps in a row on all ranks that make a
step together: to look at one costs time, as its microbatches are read before anything runs, so that
the device waits for the host. Data-parallel ranks likewise do not ask one another what their
prompts have in common, where nothing has crossed: that takes time on the host, and waits for all.
"""

from __future__ import annotations

from megatron_prefix.plan.gate import Decision

AFTER, STEPS = 2, 24
"""Training steps: of no use in a row, and left alone then."""


class Backoff:
    """Counts steps; all ranks that agree on a step count alike."""

    def __init__(self) -> None:
        self._in_a_row = self._left = 0

    def note(self, *, useful: bool) -> None:
        """Counts a step for which the effort was made."""
        self._in_a_row = 0 if useful else self._in_a_row + 1

    @property
    def is_due(self) -> bool:
        """Whether enough of them were of no use."""
        return self._in_a_row >= AFTER

    def begin(self) -> None:
        """The next `STEPS` steps are left alone; after them one of no use is enough."""
        self._in_a_row, self._left = AFTER - 1, STEPS

    def skips(self) -> bool:
        """Whether the next step is left alone; it is counted."""
        is_left = self._left > 0
        self._left -= is_left
        return is_left


def unlooked() -> Decision:
    """The decision for a step that nobody looks at."""
    reason = (
        f"sharing did not pay in {AFTER} steps, or took too much memory: looks again after"
        f" {STEPS} steps"
    )
    return Decision(False, reason, True, 1.0)
