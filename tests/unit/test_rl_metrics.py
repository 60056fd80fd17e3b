"""The metrics file and its counterpart in TensorBoard."""

from __future__ import annotations

import json
import math

import pytest

from megatron_prefix.rl.metrics import FILE, MetricsWriter


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]


def write(folder, steps: range, first: int = 1, value: float = 0.5) -> None:
    writer = MetricsWriter(folder, first)
    try:
        for step in steps:
            writer.write(step, {"train/loss": value + step, "prefix_sharing/active": 1})
    finally:
        writer.close()


def test_one_line_a_step(tmp_path) -> None:
    write(tmp_path / "new" / "run", range(1, 3))
    assert lines(tmp_path / "new" / "run") == [
        {"step": 1, "train/loss": 1.5, "prefix_sharing/active": 1},
        {"step": 2, "train/loss": 2.5, "prefix_sharing/active": 1},
    ]


def test_resuming_drops_what_comes_again_and_a_cut_line(tmp_path) -> None:
    write(tmp_path, range(1, 5))
    with open(tmp_path / FILE, "a", encoding="utf-8") as file:
        file.write('{"step": 5, "train/lo')
    write(tmp_path, range(3, 5), first=3, value=0.25)
    assert [(row["step"], row["train/loss"]) for row in lines(tmp_path)] == [
        (1, 1.5),
        (2, 2.5),
        (3, 3.25),
        (4, 4.25),
    ]


def test_what_is_not_finite_becomes_null(tmp_path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "why": "text"})
    writer.close()
    assert lines(tmp_path) == [
        {"step": 1, "train/loss": None, "train/grad_norm": None, "why": "text"}
    ]


def test_tensorboard_has_the_same_names(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(1, 4))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "prefix_sharing/active"}
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 1.5),
        (2, 2.5),
        (3, 3.5),
    ]
