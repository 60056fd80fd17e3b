"""Rollouts as the tree sees them. [pure]"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.tree import Pairs


def pairs_of(rollout: Rollout) -> Pairs:
    """The (input, label) pairs of a rollout: n-1 positions of n tokens.

    A position carries loss when its label is a trained token.
    """
    return Pairs(rollout.tokens[:-1], rollout.tokens[1:], rollout.loss_mask[1:])


def pairs_of_groups(groups: Sequence[Group], tails: bool = True) -> tuple[list[Pairs], list[int]]:
    """All rollouts of a step as pairs, and the group number of each, as `tree.build` takes them;
    `tails`: with what is behind their last loss (see `ModelSpec.needs_tails`)."""
    rollouts = [pairs_of(rollout) for group in groups for rollout in group.rollouts]
    numbers = [number for number, group in enumerate(groups) for _ in group.rollouts]
    return rollouts if tails else [rollout.up_to_loss() for rollout in rollouts], numbers
