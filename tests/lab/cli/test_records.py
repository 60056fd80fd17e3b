"""`bench --record`: rows of measurements as benchmarks/results has them."""

import json
import types

import pytest

from benchmarks import figures
from megatron_prefix.lab.cli import records
from megatron_prefix.lab.runtime.layout import Layout
from tests.harness.command_line import failure

ROW = types.SimpleNamespace(
    name="rag_musique.jsonl.gz", stock_ms=3_440.123456, prefix_ms=877.0, speedup=3.92, bound=4.42,
    of_bound=0.887, segments=10, raw_tokens=1000, executed_tokens=250, stock_gib=51.5,
    prefix_gib=49.3, predicted_gib=0.0,
)  # fmt: skip


def result(**changes):
    return {
        "model": "qwen3-8b", "set": ["num_layers=12"], "device": "NVIDIA H200", "python": "3.12",
        "torch": "2.11", "megatron_core": "0.16.1", "layout": Layout(tp=2, sequence_parallel=True),
        "forward_only": False, "rows": [ROW], **changes,
    }  # fmt: skip


def test_rows_are_appended_with_all_that_the_generator_reads(tmp_path, monkeypatch):
    path = tmp_path / "packed.jsonl"
    words = ["bench", "--record", str(path), "--tp", "2", "--plot=x.png", "--set", "a=b c"]
    monkeypatch.setattr(records.sys, "argv", ["megatron-prefix", *words])
    records.append(str(path), result(), "auto")
    records.append(str(path), result(forward_only=True, layout=Layout()), "on")
    first, second = figures.read(tmp_path)
    assert first["question"] == "packed" and first["subject"] == "rag_musique"
    assert first["model"] == "qwen3-8b, num_layers=12" and first["layout"] == "TP2 SP"
    assert first["figures"]["stock_ms"] == 3440.1235 and first["figures"]["speedup"] == 3.92
    assert first["peaks"] == {"stock_gib": 51.5, "prefix_gib": 49.3}
    assert first["command"] == "megatron-prefix bench --tp 2 --set 'a=b c'"
    assert first["versions"]["torch"] == "2.11" and first["machine"] == "NVIDIA H200"
    assert second["layout"] == "one rank"
    assert second["options"] == "mode on, passes without gradients"
    assert len(figures.newest([first, second])) == 2
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0]) == first


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["memory", "--record", "x.jsonl"], "--record takes rows of `bench`"),
        (["--record", "no/such/folder/x.jsonl"], "is missing"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_work(words, text, capsys):
    assert text in failure(capsys, "bench", *words, "--shapes", "8:4:2")
