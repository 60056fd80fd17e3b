"""`python -m benchmarks.documents`: measured rows beside published figures."""

import json

import pytest

from benchmarks import documents


def bench(folder, file, model, names, **changes):
    """A result of `bench` with these rows, 400 ms stock and 100 ms with the prefix schedule."""
    row = {
        "segment_tokens": 4096, "raw_tokens": 20000, "executed_tokens": 5000, "speedup": 4.0,
        "bound": 5.0, "of_bound": 0.8, "stock_ms": 400.0, "prefix_ms": 100.0,
        "stock_step_ms": [400.0], "prefix_step_ms": [100.0], "mfu": 0.5,
        "phase_ms": {"A": 10.0, "B": 60.0, "C": 30.0, "wait": 0.0},
    }  # fmt: skip
    result = {
        "model": model, "set": ["num_layers=4"], "forward_only": False,
        "layout": {"tp": 1, "cp": 1, "pp": 1, "sequence_parallel": False},
        "rows": [row | {"name": name} for name in names.split()],
    }  # fmt: skip
    (folder / file).write_text(json.dumps(result | changes), encoding="utf-8")


def peers(folder, **total_ms):
    """A result of `benchmarks.peers` at one shape."""
    rows = [
        {"shape": "28x4096x2048", "peer": name.replace("_", "-"), "total_ms": ms}
        for name, ms in total_ms.items()
    ]
    (folder / "peers.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")


def printed(capsys, *folders):
    assert documents.main([str(folder) for folder in folders]) == 0
    found = capsys.readouterr()
    return found.out.splitlines(), found.err


def test_rows_stand_beside_what_was_published(tmp_path, capsys):
    bench(tmp_path, "caching.json", "qwen3-8b", "16384:128:9")
    bench(tmp_path, "grid.json", "llama3-8b", "10240:2048:8 16384:64:9", set=[])
    lines, missing = printed(capsys, tmp_path)
    assert (
        "| 16,384, 128, n 9 | 7.3x | qwen3-8b | 4 | 4.00x | 5.00x | 0.800 | 400, 100 ms |" in lines
    )
    assert (
        "| 16,384, 64, n 9 | 7.5x | llama3-8b | all | 4.00x | 5.00x | 0.800 | 400, 100 ms |"
        in lines
    )
    [grid] = [line for line in lines if line.startswith("| 10240:2048:8 |")]
    assert grid.endswith("| 4,096 | 4.00x | 5.00x | 0.800 | 400, 100 ms | 10, 60, 30 | 0.500 |")
    assert "8,192, 4,096, n 9" in missing and "16,384, 64, n 9" not in missing
    heads = [lines[number - 2] for number, line in enumerate(lines) if line.startswith("|---")]
    for number, line in enumerate(lines):
        if line.startswith("|---"):
            assert lines[number - 1].count("|") == line.count("|") == lines[number + 1].count("|")
    assert len(heads) == 2


def test_passes_for_log_probs_and_updates_are_told_apart(tmp_path, capsys):
    bench(tmp_path, "step.json", "qwen3-8b", "8192:2048:8")
    lines, missing = printed(capsys, tmp_path)
    assert any(line.startswith("| update, 8 responses | 2.47x") for line in lines)
    assert "updates: log-probs, 8 responses" in missing
    bench(tmp_path, "pass.json", "qwen3-30b-a3b", "8192:2048:8", forward_only=True)
    lines, missing = printed(capsys, tmp_path)
    assert any(line.startswith("| MoE, log-probs, 8 | 3.45x") for line in lines)
    assert "MoE, update, 8" in missing


def test_rates_and_time_a_layer(tmp_path, capsys):
    bench(tmp_path, "dta.json", "qwen3-8b", "tau2_calls.jsonl.gz 5059_32.jsonl.gz")
    lines, _ = printed(capsys, tmp_path)
    [calls] = [line for line in lines if "model calls" in line]
    assert "| 4.00 | 4.00x |" in calls and "| 50.0, 200.0 |" in calls
    assert any("| 100, 25 ms | 4.00x |" in line for line in lines)


def test_several_ranks_are_not_compared(tmp_path, capsys):
    bench(tmp_path, "cp2.json", "llama3-8b", "10240:2048:8", layout={"tp": 1, "cp": 2})
    lines, missing = printed(capsys, tmp_path)
    assert lines == [""] and "10240:2048:8" in missing


def test_attention_stands_beside_the_fastest_copies(tmp_path, capsys):
    peers(tmp_path, ours=30.0, dense_cudnn=60.0, dense_fa4=54.0, dense_flash=None, flex=48.0)
    lines, missing = printed(capsys, tmp_path)
    [line] = [line for line in lines if line.startswith("| 28x4096x2048 |")]
    assert line.endswith("| 54.0 (fa4), 30.0 ms | 1.80x | 1.75 | 1.60x |")
    assert "28x16384x2048" in missing and "28x4096x2048" not in missing


def test_ours_that_failed_is_missing(tmp_path, capsys):
    peers(tmp_path, ours=None, dense_fa4=54.0)
    assert "28x4096x2048" in printed(capsys, tmp_path)[1]


def test_no_folder_is_refused(capsys):
    assert documents.main([]) == 2
    assert "give one folder" in capsys.readouterr().err


def test_the_flop_ratio_of_attention_is_that_of_visible_pairs():
    for shape, (_, ratio) in documents.ATTENTION.items():
        num, prompt, response = map(int, shape.split("x"))
        shared = prompt**2 + num * (2 * prompt * response + response**2)
        assert ratio == pytest.approx(num * (prompt + response) ** 2 / shared, rel=0.01)
