"""docs/support.md is made of the trainers' table and of recorded runs."""

from __future__ import annotations

from benchmarks import support
from benchmarks.figures import read

ROW = {
    "question": "layouts_gpus", "subject": "x", "model": "Moonlight-16B, 6 layers", "layout": "PP2",
    "options": "latents", "figures": {"speedup": 2.0}, "machine": "two H200s",
}  # fmt: skip


def test_the_page_is_current() -> None:
    text = support.PAGE.read_text(encoding="utf-8")
    assert support.written(text, read()) == text, support.COMMAND


def test_every_trainer_has_layouts_that_ran() -> None:
    rows = read()
    for trainer in support.TRAINERS:
        layouts, forms = support.layouts_of(trainer, rows)
        assert layouts and forms, trainer.name


def test_rows_are_sorted_by_family_and_place() -> None:
    dense = {**ROW, "model": "Qwen3-8B widths", "options": "", "machine": "one H200"}
    found = support.ran([ROW, ROW, {**dense, "layout": "one GPU"}])
    assert found["MLA with experts"]["two GPUs"] == ["PP2"]
    assert found["dense"]["one GPU"] == ["yes"]
    assert not support.ran([{**ROW, "question": "host_time"}])


def test_stock_steps_do_not_count_for_a_trainer() -> None:
    (verl,) = (one for one in support.TRAINERS if one.name == "verl")
    row = {**ROW, "question": "trainer_auto", "model": "verl 0.9.1", "layout": "1, PP2; TP2"}
    assert support.layouts_of(verl, [row])[0] == ["1 rank", "PP2", "TP2"]
    row["figures"] = {"second_step": "stock schedule"}
    assert support.layouts_of(verl, [row]) == ([], [])
