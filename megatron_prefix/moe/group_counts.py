"""Sums of counts over data-parallel ranks, on their way while other segments run.

The load-balancing loss over the global batch (`global_aux_loss`; Qiu et al., "Demons in the Detail:
On Implementing Load Balancing Loss for Training Specialized Mixture-of-Expert Models") weighs the
scores of microbatch m with the counts of microbatches 0..m on all ranks of a stage's tensor,
context and data-parallel group (megatron/core/transformer/moe/router.py, `_apply_global_aux_loss`).

**The rule.** A rank starts one all-reduce a microbatch, of the counts of all its routers (all model
chunks), in order of microbatches: number m when its forwards have counted microbatches 0..m in
every router.  A backward of microbatch m's segments waits for the sums 0..m, and nothing else does.

**Order.** Every rank of a group starts the same collectives in the same order, 0, 1, 2, ..., and in
forwards only, whatever its trees, its chunks or its turns with virtual stages.

**No deadlock.** By induction over m: suppose all sums before m complete.  Call the pipeline that
holds one data-parallel rank's microbatches a replica.  Its plan, without sums, ends: the simulator
has proved it.  So a replica stops for good only if one of its ranks waits in a backward for a sum
m' >= m, and the plan (`Forest.ordered`: `loss_ready_after`) has the forwards of microbatches
0..m' on the last stage before that backward there, so on every stage before its backward there,
since a segment reaches the last stage through all others.  Hence all ranks of a replica that stops
have started sum m; so have all those of one that ends.  All ranks of all replicas have then started
sum m, and it completes.  With expert parallelism replicas also meet in every expert layer; those
that do have one plan of their union, in which microbatch m is that of all of them
(plan/joint_forest.py), and are one replica above.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GroupCounts:
    """Counts of all routers of a rank, summed over their group microbatch by microbatch."""

    def __init__(self) -> None:
        self._num_routers = 0
        self._group: Any = None
        self._complete: dict[int, dict[int, Tensor]] = {}
        self._sums: list[tuple[Tensor, dist.Work | None]] = []

    def enter(self, router: Any) -> int:
        """One more router takes part; returns its place.  All enter before the first `add`."""
        self._group = router.tp_dp_cp_group
        self._num_routers += 1
        return self._num_routers - 1

    def add(self, place: int, microbatch: int, counts: Tensor) -> None:
        """Takes this rank's counts of a whole microbatch in one router; starts what is due.

        Args:
            place: the router's.
            microbatch: of the trainer.
            counts: whole numbers, [experts].
        """
        self._complete.setdefault(microbatch, {})[place] = counts
        while len(self._complete.get(len(self._sums), ())) == self._num_routers:
            found = self._complete.pop(len(self._sums))
            total = torch.stack([found[place] for place in range(self._num_routers)]).long()
            work = None
            if self._group.size() > 1:
                work = dist.all_reduce(total, group=self._group, async_op=True)
            self._sums.append((total, work))

    def take(self, place: int, microbatch: int) -> Tensor:
        """The sum over the group, int64 [experts]; waits for it.

        Raises:
            RuntimeError: this rank has not started it, so that the wait would not end.
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
