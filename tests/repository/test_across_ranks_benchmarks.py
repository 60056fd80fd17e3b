"""`benchmarks.across_ranks_planning`, `across_ranks_simulation` and `across_ranks_cpu`, small."""

import re
import sys

import pytest

from benchmarks import across_ranks_cpu, across_ranks_planning, across_ranks_simulation
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.models.presets import resolve
from tests.harness.command_line import BUNDLED


def table(capsys, monkeypatch, program, *arguments):
    """The rows that a program prints, by title."""
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    program.main()
    titles, line, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert {*line} == {"---"}
    return [dict(zip(titles, row, strict=True)) for row in rows]


def test_planning_is_timed(capsys, monkeypatch):
    options = ["--tokens", "6000", "--repeats", "1", "--ranks", "2", "3"]
    rows = table(capsys, monkeypatch, across_ranks_planning, BUNDLED, *options)
    assert [row["ranks"] for row in rows] == ["2", "3"]
    for row in rows:
        assert int(row["common spans"]) > 0 and 0 < int(row["executed"]) < 6000
        parts = [float(row[f"{name}, ms"]) for name in ("tell", "hear", "common")]
        assert float(row["sum, ms"]) == pytest.approx(sum(parts), abs=0.3)
    # Ranks of the same step have different rollouts, and another time round other tokens.
    groups = across_ranks_planning.drawn()
    ranks = across_ranks_planning.dealt(groups, 2, 500_000)
    assert [len(rank) for rank in ranks] == [334, 334]
    tokens = {rollout.inputs.tobytes() for rank in ranks for rollout in rank}
    assert len(tokens) == 668 > sum(map(len, groups))


def test_a_step_is_simulated(capsys, monkeypatch):
    [by_length, at_random] = table(
        capsys, monkeypatch, across_ranks_simulation, BUNDLED, "--ranks", "2"
    )
    assert by_length["rollouts, dealt"] == "agents, length"
    assert at_random["rollouts, dealt"] == "agents, random"
    for row in (by_length, at_random):
        free = float(row["all hides"])
        for rate in ("50", "400"):
            some = row[f"{rate} GB/s: nothing hides, in order"].split(", ")
            assert all(0 < float(one) <= free for one in some)


def test_messages_that_take_no_time_hide():
    groups, spec = [*read_groups(BUNDLED)], resolve("llama3-8b")
    fast, slow = 1e12, 1.0
    row = across_ranks_simulation.simulated(groups, spec, 2, "length", [fast, slow])
    for seconds in row.by_rate[0]:
        assert seconds == pytest.approx(row.free)
    # Two ranks have no order to wait for: what hides is what they compute meanwhile.
    in_order, unhidden = row.by_rate[1]
    assert row.free < in_order <= unhidden * (1 + 1e-9)
    kv = 2 * 32 * 8 * 128 * (2 + 4)  # of K and V in bf16, and of their gradients in fp32
    crossed = sum(row.received) * kv / (slow * 1e9)
    assert unhidden - row.free == pytest.approx(crossed)


def test_both_settings_are_timed(capfd, monkeypatch):
    """Of two ranks that are started here."""
    options = ["--groups", "2", "--max-tokens", "200", "--rounds", "1", "--set", "num_layers=1"]
    monkeypatch.setattr(sys, "argv", ["program", BUNDLED, *options])
    across_ranks_cpu.main()
    told = capfd.readouterr().out
    tokens = {
        across: [int(number) for number in numbers.split(", ")]
        for across, numbers in re.findall(r"step 1, (\w+): tokens \[([\d, ]+)\]", told)
    }
    assert {*tokens} == {"off", "on"} and sum(tokens["on"]) < sum(tokens["off"])
    found = dict(re.findall(r"^([\w ]+): [\d,.]+ .*off, [\d,.]+ on, ([\d.]+)x$", told, re.M))
    assert {*found} == {"clock", "process", "tokens of the slowest rank"}
    ratio = max(tokens["off"]) / max(tokens["on"])
    assert float(found["tokens of the slowest rank"]) == pytest.approx(ratio, abs=1e-3)
