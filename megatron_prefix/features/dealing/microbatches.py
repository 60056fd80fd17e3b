"""[pure] Whole groups, dealt to ranks and cut into microbatches of a budget of tokens.

Trainers that pack by tokens choose microbatches first and deal these to ranks, so a group's
rollouts are on many. Here ranks get groups first, balanced by what they execute. A rank then fills
its microbatches in the order of its groups, so siblings are in consecutive ones. Every rank needs
equally many: those with fewer cut their largest ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.errors import UserError
from megatron_prefix.features.dealing.rollouts import Rollouts

Ranks = list[list[list[int]]]
"""By rank and microbatch the numbers of rollouts."""


class OwnDealing(UserError):
    """Why a trainer's own dealing stays."""


def filled(rollouts: Rollouts, num_ranks: int, budget: int, multiple: int = 1) -> Ranks:
    """Microbatches of every rank: equally many, with at most `budget` tokens each.

    Args:
        rollouts: of a step; one with more tokens than the budget is in a microbatch of its own.
        num_ranks: data-parallel.
        budget: tokens of a microbatch.
        multiple: of it is the number of a rank's microbatches.

    Raises:
        OwnDealing: the rollouts are too few for equal numbers of microbatches.
    """
    if not rollouts.groups:
        raise OwnDealing("no rollouts")
    for equal in (False, True):
        if equal and len(rollouts.groups) % num_ranks:
            continue
        ranks = rollouts.dealt(num_ranks, equal=equal)
        batches = [packed(part, rollouts.lengths, budget) for part in ranks]
        num = -(-max(map(len, batches)) // multiple) * multiple
        if min(map(len, ranks)) >= num:
            return [cut(part, rollouts.lengths, num) for part in batches]
    raise OwnDealing(
        f"{len(rollouts.groups)} rollouts are too few for equal numbers of microbatches on"
        f" {num_ranks} ranks"
    )


def chunked(rollouts: Rollouts, num_ranks: int, size: int) -> Ranks:
    """Microbatches of `size` rollouts, equally many on every rank.

    Raises:
        OwnDealing: `num_ranks` times `size` does not divide the rollouts.
    """
    if len(rollouts.groups) % (num_ranks * size):
        raise OwnDealing(
            f"{len(rollouts.groups)} rollouts are no multiple of {num_ranks} ranks times {size}"
        )
    return [
        [part[start : start + size] for start in range(0, len(part), size)]
        for part in rollouts.dealt(num_ranks, equal=True)
    ]


def packed(part: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """A rank's rollouts in their order, in microbatches of at most `budget` tokens.

    Args:
        part: numbers of the rank's rollouts.
        lengths: of all rollouts, in tokens.
        budget: tokens of a microbatch; a longer rollout is alone.
    """
    batches: list[list[int]] = []
    tokens = 0
    for number in part:
        if not batches or tokens + lengths[number] > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(number)
        tokens += lengths[number]
    return batches


def cut(batches: Sequence[list[int]], lengths: Sequence[int], num: int) -> list[list[int]]:
    """As many microbatches as `num`, in the same order: the one with most tokens is cut in halves,
    again and again.

    Args:
        batches: of a rank, at most `num`, with as many rollouts at least.
        lengths: of all rollouts, in tokens.
        num: wanted.
    """
    parts = list(batches)
    while len(parts) < num:
        tokens = [sum(lengths[number] for number in part) * (len(part) > 1) for part in parts]
        place = tokens.index(max(tokens))
        part, half = parts[place], tokens[place] / 2
        ends = range(1, len(part))
        middle = min(ends, key=lambda end: abs(sum(lengths[n] for n in part[:end]) - half))
        parts[place : place + 1] = [part[:middle], part[middle:]]
    return parts
