"""[pure] The rollouts of a batch, as far as dealing them needs to know."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_prefix.features.dealing.deal import DealtCosts, cost_of_length, deal

QUADRATIC = 1 / 24576
"""As verl's `calculate_workload` has it, for a model of 7B parameters."""


class Rollouts(NamedTuple):
    """The rollouts of a batch.

    Attributes:
        groups: whose prompt each has, a name or the prompt itself.
        lengths: of each, in tokens.
        prompts: of each, in tokens.
    """

    groups: Sequence[Hashable]
    lengths: Sequence[int]
    prompts: Sequence[int]

    @classmethod
    def of_tokens(cls, tokens: Iterable[Any], prompts: Iterable[int]) -> Rollouts:
        """Rollouts whose prompts are equal are a group.

        Args:
            tokens: of each rollout, int [positions].
            prompts: of each, in tokens.
        """
        rows, lengths = [np.asarray(row) for row in tokens], list(map(int, prompts))
        beginnings = (row[:end] for row, end in zip(rows, lengths, strict=True))
        groups = [beginning.astype(np.int64).tobytes() for beginning in beginnings]
        return cls(groups, list(map(len, rows)), lengths)

    @classmethod
    def of_masks(cls, ids: Any, attended: Any, answered: Any) -> Rollouts:
        """The same of padded rows: a prompt ends where its answer begins, or at the end.

        Args:
            ids: int [rollouts, positions].
            attended: of each position whether it is no padding.
            answered: whether it is of an answer.
        """
        tokens, prompts = [], []
        for row, mask, answer in zip(ids, attended, answered, strict=True):
            kept = mask.bool()
            tokens.append(row[kept].cpu())
            places = answer[kept].nonzero().flatten().tolist()
            prompts.append(places[0] if places else len(tokens[-1]))
        return cls.of_tokens(tokens, prompts)

    @property
    def costs(self) -> list[float]:
        """What each costs alone."""
        return [cost_of_length(length, QUADRATIC) for length in self.lengths]

    @property
    def shared(self) -> list[float]:
        """What each has in common with its siblings."""
        return [cost_of_length(length, QUADRATIC) for length in self.prompts]

    @property
    def dealt_costs(self) -> DealtCosts:
        """What ranks run of them."""
        return DealtCosts.of(self.groups, self.costs, self.shared)

    def chosen(self, numbers: Sequence[int]) -> Rollouts:
        """Those of these numbers."""
        groups, lengths, prompts = ([column[n] for n in numbers] for column in self)
        return Rollouts(groups, lengths, prompts)  # type: ignore[arg-type]  # columns of their own

    def dealt(self, num_ranks: int, *, equal: bool) -> list[list[int]]:
        """The numbers of every rank's rollouts; see `deal`."""
        return deal(self.groups, self.costs, self.shared, num_ranks, equal=equal)
