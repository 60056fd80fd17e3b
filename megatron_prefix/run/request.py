"""One call of a schedule, and what is known of calls like it.

Mode "auto" leaves steps to Megatron's schedule without looking at them where sharing did not pay,
or would have taken too much memory, in `AFTER` training steps in a row on all ranks that make a
step together: to look at one costs time, as its microbatches are read before anything runs, so that
the device waits for the host. Data-parallel ranks likewise do not ask one another what their
prompts have in common, where nothing has crossed: that takes time on the host, and waits for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.parts import StepPart
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.gate import Decision
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.costs import Costs
from megatron_prefix.run.rank import Rank

AFTER, STEPS = 2, 24
"""Training steps: of no use in a row, and left alone then."""


class Backoff:
    """Counts steps; all ranks that agree on a step count alike."""

    def __init__(self) -> None:
        self._in_a_row = self._left = 0

    def note(self, *, useful: bool) -> None:
        self._in_a_row = 0 if useful else self._in_a_row + 1

    @property
    def is_due(self) -> bool:
        return self._in_a_row >= AFTER

    def begin(self) -> None:
        self._in_a_row, self._left = AFTER - 1, STEPS

    def skips(self) -> bool:
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


@dataclass(eq=False)
class StepKind:
    """What is known of calls of one kind: of one forward step, on the same models.

    Attributes:
        backoff: of looking at them; only in mode "auto".
        watched: whether the first of them has been watched, if that is wanted.
        problem: the refusal that ended sharing of this kind while segments ran; all ranks have it.
        ordered: whether losses have to be called in the trainer's order.
    """

    backoff: Backoff | None
    watched: bool = False
    logged: bool = False
    refusal: UserError | None = None
    problem: UserError | None = None
    ordered: bool = False


@dataclass(frozen=True, eq=False)
class Request:
    """One call of the schedule.

    Attributes:
        forward_step: is called instead of the trainer's; None: the trainer's is.
        stock: runs the call with the stock schedule, and that is what happens; None: it may be
            shared.
    """

    arguments: Mapping[str, Any]
    rank: Rank
    kind: StepKind
    callbacks: Callbacks
    costs: Costs
    parts: Sequence[StepPart] = ()
    forward_step: Callable[..., Any] | None = None
    stock: Callable[[], list[Any]] | None = None

    def footprint(self, *, gathers: bool) -> Any:
        """Bytes of the model on the ranks of its pipeline, with what parts of the call add to them;
        a MemoryModel. `gathers`: see Costs."""
        footprint: Any = self.costs.footprint(self.rank, gathers=gathers)
        for part in self.parts:
            footprint = part.footprint(footprint)
        return footprint

    @property
    def times(self) -> CostModel:
        """What work takes, with what parts of the call change of it."""
        times = self.costs.times
        for part in self.parts:
            times = part.times(times)
        return times

    @property
    def may_join(self) -> bool:
        """Whether spans may run in the segment of their parent. With gradients not while nothing is
        known of a device that counts bytes: what is joined cannot be recomputed."""
        return self.rank.forward_only or self.costs.is_known or not self.costs.counts

    @property
    def may_cross(self) -> bool:
        """Whether data-parallel ranks decide together if payloads cross them in this call."""
        return any(part.meets_data_ranks for part in self.parts)

    @property
    def agreeing(self) -> list[Any]:
        """Groups whose ranks end or fall back together.  Data-parallel ranks need not make equally
        many calls without gradients (evaluation, log-probs), so none waits for another there."""
        rank = self.rank
        is_local = rank.forward_only and not self.may_cross
        return rank.same_schedule if is_local else rank.companions

    @property
    def runs_outside(self) -> bool:
        """Whether what is around a language model runs in forward steps before that is called."""
        return any(part.runs_outside for part in self.parts)
