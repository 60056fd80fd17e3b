"""Reports from templates, and options from the fields of dataclasses."""

import argparse
import json
from dataclasses import dataclass, field

import pytest

from megatron_prefix.lab.cli import report
from megatron_prefix.lab.cli.arguments import add_fields
from megatron_prefix.lab.rl.settings import GrpoConfig, RunOptions, TrainSettings
from megatron_prefix.lab.runtime.layout import Layout


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


@pytest.mark.parametrize(
    ("owner", "name", "flag", "bad"),
    [
        (TrainSettings, "num_minibatches", "--minibatches", "0"),
        (TrainSettings, "loss_mean", "--loss-mean", "median"), (TrainSettings, "lr", "--lr", "nan"),
        (GrpoConfig, "clip_high", "--clip-high", "-1"),
        (RunOptions, "save_every", "--save-every", "-1"), (Layout, "tp", "--tp", "0"),
    ],
)  # fmt: skip
def test_an_option_has_range_and_default_of_its_field(owner, name, flag, bad):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_fields(parser, owner, {name: "help (default {})"})
    default = owner.__dataclass_fields__[name].default
    assert vars(parser.parse_args([])) == {flag[2:].replace("-", "_"): default}
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args([f"{flag}={bad}"])
