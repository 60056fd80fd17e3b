"""Which digests of its beginnings a rank has in common with others.  Pure: numpy only.

Digests are dealt to ranks by their values. Every rank asks the rank of each digest, which hears all
that have it, and answers where there are several. So a rank hears about as much as it has, however
many there are. Then it knows where its beginnings leave those of others, and tells all ranks the
digests of these places alone (block_tree.py).

Questions and answers are rows of numbers, the first of which is the rank that they are for. They
pass log2(ranks) others, together with those of many: each rank has messages with few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_prefix.features.across.block_tree import RankBeginnings, places_of

NO_QUESTIONS = np.zeros((0, 8), np.int32)
"""For whom, from whom, number of the place there, its beginnings there, and the digest."""
NO_ANSWERS = np.zeros((0, 3), np.int32)
"""For whom, number of the place there, and its beginnings in the job."""


def distances(num_ranks: int) -> Iterator[int]:
    """How far rows go in each step, from rank to rank."""
    return (1 << bit for bit in range((num_ranks - 1).bit_length()))


def leaving(rows: np.ndarray, rank: int, num_ranks: int, distance: int) -> np.ndarray:
    """Which rows go so far in that step: bool [num]."""
    away: np.ndarray = (rows[:, 0] - rank) % num_ranks & distance > 0
    return away


class Inquiry:
    """What a rank asks of its beginnings.

    Args:
        told: all digests of the rank.
        rank, num_ranks: which one of how many.

    Attributes:
        questions: int32 [places, 8], see NO_QUESTIONS.
    """

    def __init__(self, told: RankBeginnings, rank: int, num_ranks: int) -> None:
        self._told, self._places = told, places_of(told.digests)
        digests = told.digests[self._places.firsts]
        self.questions = np.empty((len(digests), 8), np.int32)
        self.questions[:, 0] = (digests[:, 0] >> np.uint64(32)) * np.uint64(num_ranks) >> 32
        self.questions[:, 1] = rank
        self.questions[:, 2] = np.arange(len(digests))
        self.questions[:, 3] = np.diff(self._places.bounds)
        self.questions[:, 4:] = digests.view(np.int32)

    def shared(self, answers: np.ndarray) -> RankBeginnings:
        """What all ranks hear: of digests that others have, the last one before beginnings leave
        one another or end. Then fewer beginnings, or none, have the next one.
        """
        told, places = self._told, self._places
        in_job = np.zeros(len(places.firsts), np.int64)
        in_job[answers[:, 1]] = answers[:, 2]
        having = in_job[places.place]
        behind = np.where(np.append(told.is_first(), True)[1:], 0, np.append(having, 0)[1:])
        kept = (having > 0) & (having != behind)
        alone = places.firsts[in_job == 0]
        return told._replace(
            counts=np.bincount(told.beginning()[kept], minlength=len(told.counts)),
            digests=told.digests[kept],
            ends=told.ends[kept],
            own=told.own + int((told.ends - told.starts())[alone].sum()),
        )


def answered(questions: np.ndarray) -> np.ndarray:
    """Answers to all questions about some digests.

    Args:
        questions: of all ranks, each of which asks once about a digest.

    Returns:
        Answers where several ranks ask: int32 [num, 3], see NO_ANSWERS.
    """
    places = places_of(np.ascontiguousarray(questions[:, 4:]).view(np.uint64))
    in_job = np.bincount(places.place, questions[:, 3], len(places.firsts))
    several = np.diff(places.bounds)[places.place] > 1
    answers = np.column_stack([questions[:, 1:3], in_job[places.place]])[several]
    return answers.astype(np.int32)


def told_together(ranks: Sequence[RankBeginnings]) -> list[RankBeginnings]:
    """What each of some ranks tells the others, where all are known."""
    inquiries = [Inquiry(told, rank, len(ranks)) for rank, told in enumerate(ranks)]
    answers = answered(np.concatenate([inquiry.questions for inquiry in inquiries]))
    return [
        inquiry.shared(answers[answers[:, 0] == rank]) for rank, inquiry in enumerate(inquiries)
    ]
