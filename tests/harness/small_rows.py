"""Rows of the alignment matrix with fewer rollouts, which the ranks that a test forks inherit."""

from __future__ import annotations

import pytest

from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.verify.matrix import RolloutShape


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of four rollouts where one data-parallel rank has them all, half of the matrix's.

    Still two trees, and more waves and microbatches than stages: a group more repeats them.
    """
    whole = RolloutShape.groups

    def groups(self: RolloutShape, dp: int, dtype: str) -> list[Group]:
        made = whole(self, dp, dtype)
        return made[:2] if dp == 1 else made

    monkeypatch.setattr(RolloutShape, "groups", groups)
