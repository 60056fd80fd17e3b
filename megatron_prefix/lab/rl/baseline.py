"""What the stock schedule runs on: rollouts packed as trainers pack them, or one at a time. [pure]

Trainers pack the rollouts of a step in order into microbatches of at most some tokens, and agree
over data-parallel ranks on one number of microbatches if those meet inside a step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.plans.dealing import DEALS
from megatron_prefix.lab.runtime.layout import Layout

BASELINES = ("packed", "rollout")
PACK_TOKENS = 16384
"""Trainers' microbatches have 8k to 32k tokens."""


@dataclass(frozen=True)
class Baseline:
    """How rollouts become microbatches, for both schedules.

    Attributes:
        name: "packed": several rollouts one after another (THD); "rollout": one each.
        pack_tokens: most positions of a packed microbatch, padding included and over all context-
            parallel ranks; a longer rollout is alone.
        shuffle: take a step's rollouts in a random order, so that groups are spread over
            microbatches; always the same one for as many rollouts.
        backwards: the same microbatches in reverse, and the rollouts of each: the same sums in
            another order.
        deal: how rollouts go to data-parallel ranks before that, one of `plans.dealing.DEALS`.
    """

    name: str = "packed"
    pack_tokens: int = PACK_TOKENS
    shuffle: bool = False
    backwards: bool = False
    deal: str = DEALS[0]

    def __post_init__(self) -> None:
        if self.name not in BASELINES:
            raise UserError(f"baseline {self.name!r}: give one of {', '.join(BASELINES)}")
        if self.deal not in DEALS:
            raise UserError(f"deal {self.deal!r}: give one of {', '.join(DEALS)}")
        if self.pack_tokens < 1:
            raise UserError(f"pack_tokens is {self.pack_tokens}: give a number from 1")

    @property
    def packed(self) -> bool:
        """Whether microbatches are packed."""
        return self.name == "packed"

    def order(self, num: int) -> list[int]:
        """In which order so many rollouts become microbatches."""
        return random.Random(num).sample(range(num), num) if self.shuffle else [*range(num)]


def pack_sizes(lengths: Sequence[int], pack_tokens: int, least: int = 1) -> list[int]:
    """Number of rollouts of each pack: filled in order, a pack ends when the next is too long.

    Args:
        lengths: positions of every rollout, padding included.
        pack_tokens: most positions of a pack of several rollouts.
        least: number of packs to reach; the longest of several rollouts are cut in two until then.

    Raises:
        UserError: fewer rollouts than `least`.
    """
    if least > max(len(lengths), 1):
        raise UserError(
            f"--baseline packed: {len(lengths)} rollouts of a data-parallel rank cannot fill"
            f" {least} microbatches, as many as this layout needs; give more rollouts or a larger"
            " --pack-tokens, or --baseline rollout"
        )
    packs: list[list[int]] = []
    for length in lengths:
        if not packs or sum(packs[-1]) + length > pack_tokens:
            packs.append([])
        packs[-1].append(length)
    while len(packs) < least:
        several = [number for number, pack in enumerate(packs) if len(pack) > 1]
        longest = max(several, key=lambda number: sum(packs[number]))
        packs[longest : longest + 1] = _halves(packs[longest])
    return [len(pack) for pack in packs]


def _halves(pack: list[int]) -> tuple[list[int], list[int]]:
    """A pack cut where its halves are nearest in length."""
    ends = list(itertools.accumulate(pack))
    cut = min(range(1, len(pack)), key=lambda number: abs(2 * ends[number - 1] - ends[-1]))
    return pack[:cut], pack[cut:]


def packs_of(
    ranks: Sequence[Sequence[Group]], baseline: Baseline, layout: Layout, multiple: int
) -> list[int]:
    """Packs of every data-parallel rank from its groups, whose rollouts are padded to a multiple;
    see `num_packs`. All 1 without packing."""
    if not baseline.packed:
        return [1] * len(ranks)
    lengths = [
        [-(-(len(r) - 1) // multiple) * multiple for group in rank for r in group.rollouts]
        for rank in ranks
    ]
    return num_packs(lengths, baseline, layout)


def num_packs(ranks: Sequence[Sequence[int]], baseline: Baseline, layout: Layout) -> list[int]:
    """Packs of every data-parallel rank.

    The same number on all ranks if the stock schedule needs that, and a multiple of the pipeline
    for Megatron's interleaved schedule.

    Args:
        ranks: per data-parallel rank the rollouts' numbers of positions, padding included.
        baseline: how they are packed.
        layout: of the job.
    """
    orders = [[lengths[place] for place in baseline.order(len(lengths))] for lengths in ranks]
    counts = [len(pack_sizes(lengths, baseline.pack_tokens)) for lengths in orders]
    if layout.ep > 1 or layout.vpp > 1:
        counts = [max(counts)] * len(counts)
    if layout.vpp > 1:
        counts = [-(-number // layout.pp) * layout.pp for number in counts]
    return counts
