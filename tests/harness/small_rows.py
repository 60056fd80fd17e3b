"""Rows of the alignment matrix with fewer rollouts, which the ranks that a test forks inherit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.verify.matrix import RolloutShape


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of three rollouts of the matrix's four, and two groups where one rank has them all.

    Still two trees a rank, and more waves and microbatches than stages: more would repeat them.
    """
    whole = RolloutShape.groups

    def groups(self: RolloutShape, dp: int, dtype: str) -> list[Group]:
        made = whole(self, dp, dtype)[: 2 if dp == 1 else None]
        return [replace(group, rollouts=group.rollouts[:3]) for group in made]

    monkeypatch.setattr(RolloutShape, "groups", groups)
