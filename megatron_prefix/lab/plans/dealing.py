"""How the rollouts of a step go to data-parallel ranks. [pure]

"groups" is what sharing wants: whole groups, balanced by what ranks execute (placement.py).
"length" is what most trainers do, verl by default: whoever the siblings are, every rank gets
equally many rollouts and, as nearly as possible, equally many tokens. "random" deals equally many.

A group that is dealt to several ranks is on each of them, under its name, with a part of its
rollouts: what depends on the whole group (its advantages) is computed before.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.plans.placement import equal_size, parts_of, place
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.layers.model import cost_of

DEALS = ("groups", "length", "random")


def deal(
    groups: Sequence[Group],
    spec: ModelSpec,
    layout: Layout,
    config: PrefixConfig,
    how: str = "groups",
    *,
    stock: bool,
    seed: int = 0,
) -> list[tuple[Group, ...]]:
    """The groups of every data-parallel rank; every rank gets the same answer.

    A rank without rollouts gets one position without loss: Megatron's schedules need a microbatch,
    and the other ranks wait for this one when gradients are reduced.

    Args:
        groups: of one optimizer update.
        spec: the model's shape.
        layout: of the job.
        config: of the prefix schedule.
        how: one of DEALS.
        stock: whether Megatron's own schedule runs these rollouts, too.
        seed: of "random".

    Raises:
        UserError: no such way, or the rollouts cannot be dealt as the layout needs: equally many on
            every rank (if ranks share experts and Megatron's own schedule may run, or for
            global_aux_loss), or multiples of the pipeline's size (for Megatron's interleaved
            schedule).
    """
    if how not in DEALS:
        raise UserError(f"deal {how!r}: give one of {', '.join(DEALS)}")
    interleaved = stock and layout.vpp > 1
    side_by_side = layout.ep > 1 and (stock or config.mode != "on")
    counted_together = (
        spec.moe_router_load_balancing_type == "global_aux_loss" and spec.moe_aux_loss_coeff > 0
    )
    equal = layout.dp > 1 and (interleaved or side_by_side or counted_together)
    if how == "groups":
        method = "auto" if config.mode in ("auto", "on") else "tokens"
        options = config.tree_options(layout.alignment)
        method = "equal" if equal else method
        ranks = list(place(groups, layout.dp, cost_of(spec), options, method).ranks)
    else:
        ranks = _one_by_one(groups, layout.dp, how, seed, equal=equal)
    num = sum(len(group.rollouts) for group in ranks[0])
    if interleaved and num % layout.pp:
        raise UserError(
            f"--vpp {layout.vpp}: Megatron's interleaved schedule needs the rollouts of a rank in"
            f" multiples of --pp {layout.pp}, and there are {num}; change --groups, or use --vpp 1"
        )
    first = groups[0].rollouts[0]
    idle = Rollout("idle", "0", first.tokens[:2], prompt_len=1, loss=(), reward=0.0)
    return [rank or (Group("idle", (idle,)),) for rank in ranks]


def _one_by_one(
    groups: Sequence[Group], num_ranks: int, how: str, seed: int, *, equal: bool
) -> list[tuple[Group, ...]]:
    """The groups of every rank, whose rollouts are dealt without regard to them."""
    places = [(g, r) for g, group in enumerate(groups) for r in range(len(group.rollouts))]
    if equal:
        equal_size(len(places), num_ranks)
    if how == "length":
        parts = balanced_parts([len(groups[g].rollouts[r]) for g, r in places], num_ranks)
    else:
        order = random.Random(seed).sample(range(len(places)), len(places))
        parts = [order[rank::num_ranks] for rank in range(num_ranks)]
    return [parts_of(groups, [places[number] for number in part]) for part in parts]


def balanced_parts(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Numbers of the lengths in parts of equal counts, at most one apart, and near equal sums.

    The largest differencing method (Karmarkar and Karp, "The differencing method of set
    partitioning", 1982) with equal counts: each block of `num_parts` lengths, by falling length,
    gives every part one; two blocks become one by joining the heaviest part of the one and the
    lightest of the other, those first whose parts differ most. Sums then differ by no more than the
    lengths of some block, so by no more than the longest.
    """
    falling = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    numbers = itertools.count()  # of equal differences the oldest first
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []

    def add(parts: list[tuple[int, list[int]]]) -> None:
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], next(numbers), parts))

    for start in range(0, max(len(falling), 1), num_parts):
        block = falling[start : start + num_parts]
        empty = num_parts - len(block)
        add([*((lengths[number], [number]) for number in block), *((0, []) for _ in range(empty))])
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        add([(a + b, [*ours, *theirs]) for (a, ours), (b, theirs) in pairs])
    return [part for _, part in heap[0][2]]
