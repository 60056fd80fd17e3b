"""Sums of routers' counts over data-parallel ranks, computed while other segments run.

The load-balancing loss over the global batch (`global_aux_loss`; Qiu et al., "Demons in the Detail:
On Implementing Load Balancing Loss for Training Specialized Mixture-of-Expert Models") weighs the
scores of microbatch m with the counts of microbatches 0..m on all ranks of a stage's tensor,
context and data-parallel group (megatron/core/transformer/moe/router.py, `_apply_global_aux_loss`).

**Rule.** A rank starts one all-reduce per microbatch, of the counts of all its routers (of all
model chunks), in order of microbatches: number m in one place of the plan's order, the same on all
stages, when forwards have counted microbatches 0..m in every router, and before the first backward
that waits for it (sums.py). A backward of microbatch m's segments waits for the sums 0..m; nothing
else waits. Ranks that share experts run one plan, each on its own segments, and start number m
behind the same action: in the middle of one, another of them may wait for this rank's tokens.

**Order.** Every rank of a group starts the same collectives in the same order, 0, 1, 2, ..., for
any trees, chunks and virtual stages.

**No deadlock.** All pipelines keep one order of actions, messages and sums (plan/timetable.py). Of
all that has not happened take the first: all ranks that it concerns have done what is before it.
(lab/plans/joint_judge.py plays it.) Where payloads cross data-parallel ranks, all of them have
begun to leave a rank before its first wave, and so before its first sum, which has tokens of a
wave; gradients cross after its last wave, and so after its last sum: all ranks begin both in one
order. Ranks that share experts also meet in every expert layer; they have one common plan, in which
microbatch m is that of all of them (plan/joint_forest.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GroupCounts:
    """Counts of all routers of a rank, summed over their group, microbatch by microbatch."""

    def __init__(self) -> None:
        self._num_routers = 0
        self._group: Any = None
        self._complete: dict[int, dict[int, Tensor]] = {}
        self._sums: list[tuple[Tensor, dist.Work | None]] = []

    def enter(self, router: Any) -> int:
        """Registers a router and returns its place; all register before the first `add`."""
        self._group = router.tp_dp_cp_group
        self._num_routers += 1
        return self._num_routers - 1

    def add(self, place: int, microbatch: int, counts: Tensor) -> None:
        """Takes a router's counts of a whole microbatch, whole numbers [experts]."""
        self._complete.setdefault(microbatch, {})[place] = counts

    def begin(self, number: int) -> None:
        """Starts the sums of so many microbatches, from the first on, that have not been started.

        Raises:
            RuntimeError: a router has not counted one of them.
        """
        for microbatch in range(len(self._sums), number if self._num_routers else 0):
            by_router = self._complete.pop(microbatch, {})
            if len(by_router) < self._num_routers:
                raise RuntimeError(
                    f"the sum of microbatch {microbatch} begins, and only {len(by_router)} of"
                    f" {self._num_routers} routers have counted it"
                )
            total = torch.stack([by_router[place] for place in range(self._num_routers)]).long()
            work = None
            if self._group.size() > 1:
                work = dist.all_reduce(total, group=self._group, async_op=True)
            self._sums.append((total, work))

    def take(self, place: int, microbatch: int) -> Tensor:
        """The sum over the group, int64 [experts]; waits for it.

        Raises:
            RuntimeError: this rank has not started the sum, so the wait would never end.
        """
        if microbatch >= len(self._sums):
            raise RuntimeError(
                f"counts of microbatch {microbatch} asked for, but only {len(self._sums)}"
                " microbatches have been counted in all routers of this rank"
            )
        total, work = self._sums[microbatch]
        if work is not None:
            work.wait()
            self._sums[microbatch] = total, None
        return total[place]
