"""Rows of the alignment matrix with fewer rollouts and layers, in ranks that a test forks."""

from dataclasses import replace

import pytest

from megatron_prefix.lab.verify.matrix import LAYOUTS, RECURRENT, RolloutShape, Row


@pytest.fixture(autouse=True)
def small_rows(monkeypatch):
    """Groups of three rollouts of the matrix's four, and two groups where one rank has them all;
    two layers of four, unless each is a stage or they are of several kinds.

    Still two trees a rank, and more waves and microbatches than stages: more would repeat them.
    """
    groups_of, overrides_of = RolloutShape.groups, Row.overrides

    def groups(self, dp, dtype):
        made = groups_of(self, dp, dtype)[: 2 if dp == 1 else None]
        return [replace(group, rollouts=group.rollouts[:3]) for group in made]

    def overrides(self, dtype):
        layout, fields = LAYOUTS[self.layout][0], overrides_of(self, dtype)
        if self.model in RECURRENT or layout.pp * layout.vpp > 2:
            return fields
        experts = {"moe_layer_freq": (0, 1)} if self.model.startswith("mla") else {}
        return {**fields, "num_layers": 2, **experts}

    monkeypatch.setattr(RolloutShape, "groups", groups)
    monkeypatch.setattr(Row, "overrides", overrides)
