"""Routers of a step: what they count for their losses, and when sums over ranks begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.ledger import RouterLedger
from megatron_prefix.features.experts.routers import forget_graphs, routers
from megatron_prefix.features.experts.sums import prove, sums_of
from megatron_prefix.features.experts.tokens import LogicalTokens
from megatron_prefix.parts import Attempt, StepPart

if TYPE_CHECKING:
    from torch import Tensor

AroundRouter = Callable[[Any, int, int], AbstractContextManager[None]]


class Routers(StepPart):
    """The routers of this rank's model chunks in a step.

    Attributes:
        ledgers: of the model chunks; () without gradients, and where no chunk has a router.
        ledger_of: the same by router.
        around: by router what is around its choice of experts: (router, segment, its tokens) ->
            context. Other parts fill it when an attempt begins.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._routers = [routers(model) for model in self.rank.language_models]
        self.ledgers: Sequence[RouterLedger] = ()
        self.ledger_of: dict[Any, RouterLedger] = {}
        self.around: dict[Any, AroundRouter] = {}
        self._tokens: LogicalTokens | None = None
        self._scales: Tensor | None = None
        self._counts = GroupCounts()

    def begin(self, attempt: Attempt) -> None:
        """See StepPart.

        Raises:
            UserError: seq_aux_loss with samples of different lengths in a microbatch; a plan file
                whose backwards wait for what other ranks count later.
        """
        rank, step = self.rank, attempt.step
        if rank.forward_only or not any(self._routers):
            return
        cp, scales = rank.groups.cp, attempt.contract.scales
        self._scales = None if scales is None else scales.routers
        self._tokens = LogicalTokens(
            step.forest, step.microbatch_of, rank.device, cp.rank(), cp.size(), step.packed
        )
        self.make_ledgers(RouterLedger)
        if rank.ordered:
            of_union = attempt.report.union_plan, attempt.joint.union_microbatch_of
            prove(*of_union)
            self.sums = [*sums_of(*of_union)]

    def make_ledgers(self, make: Callable[..., RouterLedger]) -> None:
        """Makes the ledgers, or others in their place before the first action.

        Args:
            make: with the arguments of RouterLedger.
        """
        if self._tokens is None:
            return
        self._counts = GroupCounts()
        self.ledgers = [
            make(self._tokens, by_layer, self._counts, self._scales) for by_layer in self._routers
        ]
        pairs = zip(self._routers, self.ledgers, strict=True)
        self.ledger_of = {
            router: ledger for by_layer, ledger in pairs for router in by_layer.values()
        }

    def sum(self, number: int) -> None:
        """See StepPart: of counts."""
        self._counts.begin(number)

    def end(self) -> None:
        """See StepPart."""
        for ledger in self.ledgers:
            ledger.clear()
        self.ledgers, self.sums, self._tokens = (), (), None
        self.ledger_of.clear()
        self.around.clear()
        for model in self.rank.language_models:
            forget_graphs(model)


def routers_of(parts: Iterable[StepPart]) -> Routers | None:
    """The part of a step that has its routers; None without experts."""
    for part in parts:  # not `next`: a router asks several times a forward
        if isinstance(part, Routers):
            return part
    return None
