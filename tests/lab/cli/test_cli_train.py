"""`megatron-prefix train`: output, exit codes, and bad input that writes nothing; reports
from templates, rows of records, and options from fields."""

import argparse
import json
import os
import re
import types
from dataclasses import dataclass, field, fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import figures
from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli import records, report
from megatron_prefix.lab.cli.arguments import add_fields
from megatron_prefix.lab.cli.modelling import overrides_of
from megatron_prefix.lab.rl import updates
from megatron_prefix.lab.rl.run import Summary
from megatron_prefix.lab.rl.settings import GrpoConfig, RunOptions, TrainSettings
from megatron_prefix.lab.runtime.layout import Layout
from tests.harness.command_line import captured, printed, row
from tests.harness.data import BUNDLED
from tests.harness.ranks import run_ranks

KEYS = {field.name for field in fields(Summary)} | {"plan_svg", "trace", "dropped_rollouts"}
SMALL = ["--set", "num_layers=1", "--groups", "2", "--groups-per-step", "1", "--max-tokens", "80"]


def train(*arguments):
    """Runs the verb in a fresh process; exit code, stdout, stderr."""
    return run_ranks(1, captured, "train", *arguments)[0]


def a_file(folder, **changes):
    path = folder / "rollouts.jsonl"
    path.write_text(row(**changes), encoding="utf-8")
    return str(path)


def test_json_is_one_object_and_progress_goes_elsewhere(tmp_path):
    folder = tmp_path / "run"
    picture = folder / "pictures" / "plan.svg"
    code, out, err = train(
        str(BUNDLED), *SMALL, "--compare", "--json", "--progress", "--output", str(folder),
        "--plan-svg", str(picture), "--save-every", "1",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    assert result.keys() == KEYS
    assert result["passed"] is True and result["error"] is None
    assert (result["first_step"], result["last_step"]) == (1, 2)
    assert 0 < result["executed_tokens"] < result["raw_tokens"]
    assert result["grad_max_rel_diff"] <= result["tolerance"]
    assert result["speedup"] == pytest.approx(result["stock_step_s"] / result["step_s"])
    assert "step 2 of 2: loss " in err and "tokens/s" in err
    assert Path(result["metrics"]).read_text(encoding="utf-8").count("\n") == 2
    assert (Path(result["checkpoint"]) / "train.json").is_file()
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_difference_beyond_the_policy_is_exit_code_1(tmp_path, monkeypatch):
    make = updates.forward_step
    calls = iter(range(100))
    monkeypatch.setattr(
        updates, "forward_step", lambda config, weight: make(config, weight=1 + next(calls) % 2)
    )
    code, out, _ = train(str(BUNDLED), *SMALL, "--compare", "--output", str(tmp_path))
    assert code == 1 and "NOT aligned" in out and "gradient of" in out


def test_a_run_that_cannot_go_on_is_exit_code_1(tmp_path):
    path = a_file(tmp_path, advantage=-1.0, old_logprobs=[-1e6] * 2)
    code, out, err = train(path, "--json", "--output", str(tmp_path / "run"))
    assert code == 1
    assert "step 1: loss inf" in json.loads(out)["error"]
    assert "--max-skipped 0" in err


def test_bad_rollouts_are_exit_code_2(tmp_path):
    path = a_file(tmp_path, reward=float("nan"))
    code, out, err = train(path, "--output", str(tmp_path / "run"))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "rollouts.jsonl:1: reward: not finite" in err
    assert os.listdir(tmp_path) == ["rollouts.jsonl"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--compare", "--prefix-schedule", "off"], "compare with .* mode off"),
    (["--compare", "--prefix-schedule", "observe"], "compare with .* mode observe"),
    (["--plan-svg", "p.svg", "--prefix-schedule", "off"], "--plan-svg"),
    (["--dtype", "float64", "--clip-grad", "1"], "float64 with clip_grad 1.0"),
    (["--clip-low", "0"], "clip_low is 0.0"), (["--lr", "nan"], "--lr: .nan. is not a number"),
    (["--cp", "2"], "cp"),
    (["--trace", "t.json", "--prefix-schedule", "off"], "--trace: --prefix-schedule off runs"),
    (["--prefix-plan", "no.csv"], "no.csv: cannot be read"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_bad_usage_is_exit_code_2(tmp_path, arguments, message):
    path = a_file(tmp_path)
    code, out, err = train(path, *arguments, "--output", str(tmp_path / "run"))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and re.search(message, err), err
    assert os.listdir(tmp_path) == ["rollouts.jsonl"]


def test_the_command_starts_its_own_ranks(tmp_path):
    result = printed(
        "train", str(BUNDLED), *SMALL[:-4], "--dp", "2", "--max-tokens", "80",
        "--groups-per-step", "2", "--steps", "1", "--output", str(tmp_path),
    )  # fmt: skip
    assert result["last_step"] == 1 and result["error"] is None
    (line,) = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["prefix_sharing/raw_tokens"] == result["raw_tokens"]


@dataclass
class Inner:
    ratio: float = float("nan")


@dataclass
class Result:
    tokens: int = 12345
    steps: tuple[Inner, ...] = (Inner(), Inner(0.5))
    by_run: dict[str, float] = field(default_factory=lambda: {"stock": 1.5})
    speedup: float | None = None


def test_a_template_takes_fields_attributes_and_keys():
    values = vars(Result())
    assert report.filled("{tokens:n} at {by_run[stock]:.2f}", values) == "12,345 at 1.50"
    assert report.filled("{steps[1].ratio:.1%}", values) == "50.0%"
    assert report.filled("{tokens} x {speedup:.2f}", values) is None


def test_dataclasses_become_json_without_nan():
    assert json.loads(report.to_json({"result": Result()})) == {
        "result": {
            "tokens": 12345, "steps": [{"ratio": None}, {"ratio": 0.5}],
            "by_run": {"stock": 1.5}, "speedup": None,
        }
    }  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "flag", "bad"), [
    (TrainSettings, "num_minibatches", "--minibatches", "0"),
    (TrainSettings, "loss_mean", "--loss-mean", "median"), (TrainSettings, "lr", "--lr", "nan"),
    (GrpoConfig, "clip_high", "--clip-high", "-1"),
    (RunOptions, "save_every", "--save-every", "-1"), (Layout, "tp", "--tp", "0"),
])  # fmt: skip
def test_an_option_has_range_and_default_of_its_field(owner, name, flag, bad):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_fields(parser, owner, {name: "help (default {})"})
    default = owner.__dataclass_fields__[name].default
    assert vars(parser.parse_args([])) == {flag[2:].replace("-", "_"): default}
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args([f"{flag}={bad}"])


def test_values_have_the_types_of_their_fields():
    given = ["num_layers=2", "qk_layernorm=False", "layernorm_epsilon=1e-5", "num_moe_experts=None"]
    assert overrides_of(given) == (
        ("num_layers", 2), ("qk_layernorm", False),
        ("layernorm_epsilon", 1e-5), ("num_moe_experts", None),
    )  # fmt: skip


def test_old_names_of_fields_are_taken_and_logged(caplog):
    given = ["num_experts=none", "squared_relu=true", "moe_normalize_top_k=False", "init_std=0.5"]
    assert dict(overrides_of(given)) == {
        "num_moe_experts": None, "gated_linear_unit": False, "moe_router_pre_softmax": True,
        "init_method_std": 0.5,
    }  # fmt: skip
    assert len(caplog.messages) == 4
    assert "--set squared_relu=true is now --set gated_linear_unit=False" in caplog.messages


@pytest.mark.parametrize(("setting", "message"), [
    ("num_layers=none", "num_layers is int; give a value of that type"),
    ("num_moe_experts=some", "num_moe_experts is int | None; give a value of that type"),
    ("moe_layer_freq=0,x", "moe_layer_freq is int | tuple[int, ...]; give a value of that type"),
    ("qk_layernorm=yes", "qk_layernorm is bool; give a value of that type"),
    ("layers=2", "layers=2: no such field; fields: "),
])  # fmt: skip
def test_others_are_refused(setting, message):
    with pytest.raises(UserError) as refused:
        overrides_of([setting])
    assert message in str(refused.value)


ROW = types.SimpleNamespace(
    name="rag_musique.jsonl.gz", stock_ms=3_440.123456, prefix_ms=877.0, speedup=3.92, bound=4.42,
    of_bound=0.887, segments=10, raw_tokens=1000, executed_tokens=250, stock_gib=51.5, bubble=0.1,
    prefix_gib=49.3, predicted_gib=0.0, simulated_bubble=0.1, graph_tokens=2048, captured_ms=0.0,
)  # fmt: skip


def result(**changes):
    return {
        "model": "qwen3-8b", "set": ["num_layers=12"], "device": "NVIDIA H200", "python": "3.12",
        "torch": "2.11", "megatron_core": "0.16.1", "layout": Layout(2, 2, sequence_parallel=True),
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
    assert first["model"] == "qwen3-8b, num_layers=12" and first["layout"] == "TP2 x PP2 SP"
    assert first["figures"]["stock_ms"] == 3440.1235 and first["figures"]["bubble_simulated"] == 0.1
    assert first["peaks"] == {"stock_gib": 51.5, "prefix_gib": 49.3}
    assert first["command"] == "megatron-prefix bench --tp 2 --set 'a=b c'"
    assert first["versions"]["torch"] == "2.11" and first["machine"] == "NVIDIA H200"
    assert second["layout"] == "one rank" and "bubble" not in second["figures"]
    assert second["options"] == "mode on, passes without gradients"
    assert len(figures.newest([first, second])) == 2
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0]) == first
