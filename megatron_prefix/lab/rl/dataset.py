"""The rollouts of a training run, step by step in the order of the files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group


@dataclass(frozen=True)
class RolloutSet:
    """The groups of a run; token ids are below the model's vocabulary size.

    Attributes:
        groups: in the order of the files.
    """

    groups: tuple[Group, ...]

    def take(self, position: int, count: int) -> list[Group]:
        """`count` groups from `position` on; the first group follows the last.

        Raises:
            UserError: `count` exceeds the number of groups.
        """
        if count > len(self.groups):
            raise UserError(
                f"--groups-per-step {count} exceeds the {len(self.groups)} groups of the rollouts; "
                "give fewer"
            )
        return [self.groups[(position + i) % len(self.groups)] for i in range(count)]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that training uses; file names and compression do not change it."""
        digest = hashlib.sha256()
        for group in self.groups:
            for rollout in group.rollouts:
                names = (rollout.group, rollout.uid, len(rollout), rollout.prompt_len, rollout.loss)
                digest.update(repr((*names, rollout.reward, rollout.advantage)).encode())
                digest.update(rollout.tokens.astype("<i4").tobytes())
                if rollout.old_logprobs is not None:
                    digest.update(rollout.old_logprobs.astype("<f8").tobytes())
        return digest.hexdigest()


def minibatches(groups: Sequence[Group], num_minibatches: int) -> list[Sequence[Group]]:
    """A step's groups by minibatch, equally many each, over all data-parallel ranks.

    Raises:
        UserError: the number of groups is not a multiple of `num_minibatches`.
    """
    if not groups or len(groups) % num_minibatches:
        raise UserError(
            f"--groups-per-step {len(groups)} is not a multiple of --minibatches {num_minibatches};"
            " change one of them"
        )
    size = len(groups) // num_minibatches
    return [groups[start : start + size] for start in range(0, len(groups), size)]
