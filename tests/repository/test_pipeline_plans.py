"""The benchmark of three plans on two ranks: its form at a tiny size, not its times."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from benchmarks.barriers import barrier_plan, phase
from benchmarks.pipeline_plans import NAMES, barrier_links, main
from megatron_prefix.tree import TreeOptions, build
from tests.harness import ranks  # noqa: F401  # ranks are forked from here
from tests.harness.trees import flat_rollouts


def test_it_runs_and_compares_orders(capsys):
    sizes = dict(groups=2, rollouts=2, prompt=32, response=8, hidden=32, layers=2, repeats=2)
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    code = main([*options, "--chunk-tokens", "16", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["setting"] == {**sizes, "chunk_tokens": 16, "device": "cpu", "model": ""}
    assert found["stock_ms"] > 0
    assert [row["plan"] for row in found["plans"]] == list(NAMES)
    for row in found["plans"]:
        assert 0 < row["fastest_ms"] <= row["measured_ms"] <= row["slowest_ms"]
        assert row["simulated_ms"] > 0
        assert 0 < row["simulated_bubble"] < 1 and 0 < row["measured_bubble"] < 1
    simulated, measured = (
        [row["plan"] for row in sorted(found["plans"], key=lambda row: row[column])]
        for column in ("simulated_ms", "measured_ms")
    )
    assert found["orders_agree"] == (simulated == measured) == (code == 0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_wait_between_phases_and_nowhere_else(rank, monkeypatch):
    forest = build(*flat_rollouts(64, 16, 5, 3), TreeOptions(segment_tokens=16, chunk_tokens=32))
    plan = barrier_plan(forest, 3)
    waits = []
    done = []
    monkeypatch.setattr(dist, "barrier", lambda: waits.append(len(done) - 1))
    links = barrier_links(SimpleNamespace(rank=rank, size=1), plan, None, None, None, True)
    for action in plan.programs[rank]:
        links.advance()
        done.append(action)
        links.advance()
    phases = [phase(plan, action) for action in plan.programs[rank]]
    changes = [place for place, (a, b) in enumerate(itertools.pairwise(phases)) if a != b]
    assert waits == changes
    assert len(waits) == 3 * 3 - 1
