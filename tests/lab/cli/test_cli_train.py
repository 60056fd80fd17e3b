"""`megatron-prefix train`: output, exit codes, and bad input that writes nothing."""

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_prefix.lab.rl import updates
from megatron_prefix.lab.rl.run import Summary
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
