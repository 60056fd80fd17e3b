"""How many tokens data-parallel ranks execute of a step that was dealt to them. [pure]

A rank alone shares what its own rollouts share. Across ranks every shared span runs once in the
whole job, on one rank with a rollout below it, its owner. Owners are not chosen here: a rank
executes at least what no other rank has, and the slowest at least the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.tree import TreeOptions, build


@dataclass(frozen=True)
class DealtTokens:
    """Tokens, which are positions with a label, of every data-parallel rank.

    Attributes:
        rollouts: dealt to each rank.
        raw_tokens: of each rank's rollouts.
        executed_tokens: of each rank if it shares alone.
        own_tokens: of each rank, those of `executed_tokens_across_ranks` that no other rank has.
        executed_tokens_across_ranks: of all ranks together if every shared span of the job runs
            once.
    """

    rollouts: tuple[int, ...]
    raw_tokens: tuple[int, ...]
    executed_tokens: tuple[int, ...]
    own_tokens: tuple[int, ...]
    executed_tokens_across_ranks: int

    @property
    def slowest(self) -> int:
        """The rank that executes most if each shares alone."""
        return self.executed_tokens.index(max(self.executed_tokens))

    @property
    def speedup(self) -> float:
        """Of the slowest rank, by tokens, over no sharing, if each shares alone."""
        return max(self.raw_tokens) / max(self.executed_tokens)

    @property
    def speedup_across_ranks(self) -> float:
        """The same across ranks, if owners make ranks as even as what each has alone allows."""
        mean = self.executed_tokens_across_ranks / len(self.raw_tokens)
        return max(self.raw_tokens) / max(mean, *self.own_tokens)


def dealt_tokens(
    ranks: Sequence[Sequence[Group]],
    options: TreeOptions,
    spec: ModelSpec,
    advance: Callable[[int], None] = lambda count: None,
) -> DealtTokens:
    """Counts a dealt step.

    Args:
        ranks: per data-parallel rank its groups, at least one; parts of one group have one name.
        options: how rollouts become segments.
        spec: the model.
        advance: takes each rank that was counted.
    """
    pairs = [pairs_of_groups(groups, spec.needs_tails) for groups in ranks]
    alone = []
    for some in pairs:
        alone.append(build(*some, options))
        advance(1)
    names = [[one.group for group in groups for one in group.rollouts] for groups in ranks]
    numbers = {name: n for n, name in enumerate(dict.fromkeys(itertools.chain(*names)))}
    held = [
        (rank, numbers[name], one)
        for rank, ((some, _), mine) in enumerate(zip(pairs, names, strict=True))
        for one, name in zip(some, mine, strict=True)
    ]
    held.sort(key=lambda entry: entry[1])  # siblings are packed together
    joint = build([one for *_, one in held], [number for _, number, _ in held], options)
    own = [0] * len(ranks)
    for segment in joint.segments:
        for span in segment.spans:
            holders = {held[rollout][0] for rollout in span.rollouts}
            if len(holders) == 1:
                own[holders.pop()] += span.length
    return DealtTokens(
        tuple(len(forest.num_positions) for forest in alone),
        tuple(forest.raw_tokens for forest in alone),
        tuple(forest.executed_tokens for forest in alone),
        tuple(own),
        joint.executed_tokens,
    )
