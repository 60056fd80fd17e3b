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

from megatron_prefix import trainers
from megatron_prefix.run.agreement import all_say
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.step import Step
from megatron_prefix.tree import Pairs
from megatron_prefix.tree.beginnings import digests, least_repeated, least_saved

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
        repeated: what several ranks execute, less once: `across_ranks` saves it; at least.
        slowest: executed by the rank that executes most, each sharing alone; at most.
        own: of these what no other rank executes, too; of the rank that has most; at most.
    """

    tokens: int
    shareable: int
    shared: int
    num_ranks: int
    repeated: int
    slowest: int
    own: int

    @property
    def mean(self) -> float:
        """Executed by a rank in the mean with `across_ranks`; at most."""
        return (self.tokens - self.shared - self.repeated) / self.num_ranks

    @property
    def speedup(self) -> float:
        """Of the slowest rank by `across_ranks`, by tokens, if owners make ranks as even as what
        each has alone allows.

        At least: what digests miss of a beginning (see `LENGTHS`) is missing in all three figures,
        and most in `mean`, if ranks have about equally many samples of it.
        """
        return max(1.0, self.slowest / max(self.mean, self.own, 1.0))


def _lengths() -> list[int]:
    lengths = [SHORTEST]
    while lengths[-1] < LONGEST:
        lengths.append(int(lengths[-1] * GROWTH))
    return lengths


LENGTHS = _lengths()


def beginnings(samples: Sequence[Pairs]) -> list[list[bytes]]:
    """Digests of how every sample begins, up to each of `LENGTHS` that it reaches."""
    reached = (LENGTHS[: bisect.bisect(LENGTHS, len(sample))] for sample in samples)
    return [[*digests(*both)] for both in zip(samples, reached, strict=True)]


def exchange(samples: Sequence[Pairs], groups: Any) -> SharingAcrossRanks:
    """All ranks of `groups.dp_cp` call this; those of a context-parallel group have one sample."""
    mine: tuple[int, list[list[bytes]]] = (0, [])
    if groups.cp.rank() == 0:
        mine = sum(map(len, samples)), beginnings(samples)
    heard = all_say(mine, groups.dp_cp) if groups.dp_cp.size() > 1 else [mine]
    return counted(heard, len(heard) // groups.cp.size())


def counted(
    heard: Sequence[tuple[int, Sequence[Sequence[bytes]]]], num_ranks: int
) -> SharingAcrossRanks:
    """What ranks could share, and do.

    Args:
        heard: of every rank the tokens of its samples, and how these begin; nothing of those that
            have another's samples (context parallelism).
        num_ranks: data-parallel ranks.
    """
    tokens = [num for num, _ in heard]
    digests_of = [begins for _, begins in heard]
    shared = [least_saved(some, LENGTHS) for some in digests_of]
    repeated, common = least_repeated(digests_of, LENGTHS)
    executed = [num - saved for num, saved in zip(tokens, shared, strict=True)]
    return SharingAcrossRanks(
        tokens=sum(tokens),
        shareable=least_saved([one for some in digests_of for one in some], LENGTHS),
        shared=sum(shared),
        num_ranks=num_ranks,
        repeated=repeated,
        slowest=max(executed),
        own=max(num - part for num, part in zip(executed, common, strict=True)),
    )


class Watch:
    """Counts steps, and looks at some of them.

    Attributes:
        last: of the last step that was looked at; None on pipeline stages behind the first.
    """

    def __init__(self) -> None:
        self.last: SharingAcrossRanks | None = None
        self._num_steps = 0

    def look(self, step: Step, rank: Rank, *, setting: str) -> None:
        """All ranks call this for a step that they have agreed to go on with.

        Args:
            step: read.
            rank: this one; in a call without gradients nothing is looked at.
            setting: what makes prompts run once in the job, or why that cannot be; "": they do.
        """
        if rank.forward_only:
            return
        self._num_steps += 1
        if self._num_steps % EVERY != 1 or not rank.is_first or rank.data_ranks is None:
            return
        self.last = exchange(step.samples or (), rank.groups)
        if rank.data_ranks.rank() == 0 and rank.groups.tp.rank() == 0:
            tell(self.last, setting)


def tell(sharing: SharingAcrossRanks, setting: str) -> None:
    """Logs it, as a warning where much could be shared and is not; `setting`: see `Watch.look`."""
    missed = sharing.shareable - sharing.shared
    line = (
        f"of {sharing.tokens} tokens of this step at least {sharing.shareable} are shareable,"
        f" {sharing.shared} on the ranks where they are"
    )
    if missed <= WORTH_TELLING * sharing.tokens or not setting:
        logger.info(line)
        return
    trainer = trainers.running()
    how = f"; what keeps them together in {trainer.name}: {trainer.together}" if trainer else ""
    logger.warning(
        "%s: groups are scattered over %d data-parallel ranks; the slowest executes %d tokens, and"
        " with across_ranks a rank %.0f in the mean, at least %.2fx: %s%s",
        line, sharing.num_ranks, sharing.slowest, sharing.mean, sharing.speedup, setting, how,
    )  # fmt: skip
