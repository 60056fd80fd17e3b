"""Routers of a step: what they count for their losses, and when sums over ranks begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.ledger import RouterLedger
from megatron_prefix.features.experts.routers import forget_graphs, routers
from megatron_prefix.features.experts.sums import prove, sums_behind
from megatron_prefix.features.experts.tokens import LogicalTokens
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.refusals.table import GLOBAL_CHUNKS
from megatron_prefix.run.rank import default_groups

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_prefix.errors import Reason

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
        self._begun: Sequence[int] = ()

    def refusals(self) -> Iterator[Reason]:
        """See StepPart. Pipelines that plan apart may begin sums and messages in two orders, which
        a device with one queue does not survive (lab/plans/joint_judge.py)."""
        rank, ranks_of = self.rank, dist.get_process_group_ranks
        everyone = rank.data_ranks or default_groups().dp_cp
        together = ranks_of(rank.experts or rank.groups.cp)
        if rank.ordered and len(rank.models) > 1 and {*ranks_of(everyone)} - {*together}:
            yield GLOBAL_CHUNKS.given()

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
            of_union = attempt.report.union_plan, rank.stage, attempt.joint.union_microbatch_of
            prove(*of_union)
            self._begun = sums_behind(*of_union)

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

    def acted(self, place: int) -> None:
        """See StepPart: sums of counts begin behind an action."""
        if self._begun:
            self._counts.begin(self._begun[place])

    def end(self) -> None:
        """See StepPart."""
        for ledger in self.ledgers:
            ledger.clear()
        self.ledgers, self._begun, self._tokens = (), (), None
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
