"""What rollouts of one prompt could share, were they not on several data-parallel ranks.

Every rank sends digests of how its samples begin, at lengths that grow by a quarter: some forty
numbers per sample, no tokens. Where two digests of a length agree the samples agree up to there, so
what comes out is a lower bound, at most a quarter off.

Ranks exchange only in modes "observe" and "auto", in the first step with gradients and in every
50th, after they have agreed to go on with the step (`agreement.agree`): until then each of them may
end or fall back alone. A trainer whose process groups lack `dp_cp` has no such agreement over
data-parallel ranks, and no exchange.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_prefix import trainers
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.step import Step
from megatron_prefix.tree import Pairs
from megatron_prefix.tree.beginnings import digests, least_saved

logger = logging.getLogger(__name__)

EVERY = 50
"""Steps with gradients from one exchange to the next; the first one has the first."""
SHORTEST, GROWTH, LONGEST = 32, 1.25, 1 << 20
"""Lengths at which samples are compared, in tokens."""
WORTH_TELLING = 0.05
"""Part of a step's tokens that could be shared and are not."""


class SharingAcrossRanks(NamedTuple):
    """Tokens of a step on all data-parallel ranks.

    Attributes:
        tokens: of all samples.
        shareable: that need not run again, were all samples on one rank; at least.
        shared: the same, on the ranks where the samples are.
        num_ranks: data-parallel ranks.
    """

    tokens: int
    shareable: int
    shared: int
    num_ranks: int


def _lengths() -> list[int]:
    lengths = [SHORTEST]
    while lengths[-1] < LONGEST:
        lengths.append(int(lengths[-1] * GROWTH))
    return lengths


LENGTHS = _lengths()


def beginnings(samples: Sequence[Pairs]) -> list[list[bytes]]:
    """Digests of every sample's first positions, up to each of `LENGTHS` that it reaches."""
    reached = (LENGTHS[: bisect.bisect(LENGTHS, len(sample))] for sample in samples)
    return [[*digests(*both)] for both in zip(samples, reached, strict=True)]


def exchange(samples: Sequence[Pairs], groups: Any) -> SharingAcrossRanks:
    """All ranks of `groups.dp_cp` call this; those of a context-parallel group have one sample."""
    mine: tuple[int, list[list[bytes]]] = (0, [])
    if groups.cp.rank() == 0:
        mine = sum(map(len, samples)), beginnings(samples)
    heard: list[Any] = [mine]
    if groups.dp_cp.size() > 1:
        heard = [None] * groups.dp_cp.size()
        dist.all_gather_object(heard, mine, group=groups.dp_cp)
    everything = [sample for _, ranks in heard for sample in ranks]
    return SharingAcrossRanks(
        tokens=sum(num for num, _ in heard),
        shareable=least_saved(everything, LENGTHS),
        shared=sum(least_saved(ranks, LENGTHS) for _, ranks in heard),
        num_ranks=len(heard) // groups.cp.size(),
    )


class Watch:
    """Counts steps, and looks at some of them.

    Attributes:
        last: of the last step that was looked at; None on pipeline stages behind the first.
    """

    def __init__(self) -> None:
        self.last: SharingAcrossRanks | None = None
        self._num_steps = 0

    def look(self, step: Step, rank: Rank, *, forward_only: bool) -> None:
        """All ranks call this for a step that they have agreed to go on with."""
        if forward_only:
            return
        self._num_steps += 1
        if self._num_steps % EVERY != 1 or not rank.is_first or rank.data_ranks is None:
            return
        self.last = exchange(step.samples or (), rank.groups)
        if rank.data_ranks.rank() == 0 and rank.groups.tp.rank() == 0:
            tell(self.last)


def tell(sharing: SharingAcrossRanks) -> None:
    """Logs it, as a warning where much could be shared and is not."""
    missed = sharing.shareable - sharing.shared
    line = (
        f"of {sharing.tokens} tokens of this step at least {sharing.shareable} are shareable,"
        f" {sharing.shared} on the ranks where they are"
    )
    if missed <= WORTH_TELLING * sharing.tokens:
        logger.info(line)
        return
    trainer = trainers.running()
    how = f"; what keeps them together in {trainer.name}: {trainer.together}" if trainer else ""
    logger.warning(
        "%s: groups are scattered over %d data-parallel ranks%s", line, sharing.num_ranks, how
    )
