"""What users set is checked once, with both values and the fix."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli.arguments import config_of
from megatron_prefix.lab.cli.main import make_parser
from megatron_prefix.tree import TreeOptions


def test_defaults_are_valid_and_those_of_the_tree() -> None:
    config = PrefixConfig()
    assert config.tree_options(1) == TreeOptions(segment_gain=32 * 32, share="batch")
    assert config.mode == "on"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "maybe"}, "mode is 'maybe': give one of off, observe, auto, on"),
        ({"memory": "forget"}, "memory is 'forget': give one of retain"),
        ({"run_ahead": 3}, "run_ahead is 3: give one of 1, 2"),
        ({"run_ahead": 0}, "run_ahead is 0"),
        ({"min_speedup": 0.0}, "min_speedup is 0.0: give a finite number above 0"),
        (
            {"memory_budget_gb": 1e300},
            "memory_budget_gb is 1e.300: give a number from 0 to 1000000",
        ),
        (
            {"memory_budget_gb": 1e-7},
            "memory_budget_gb is 1e-07, and no step runs in less than 1e-06: give GiB",
        ),
        ({"min_gain": 10**26}, "min_gain is 1000.*000: give at most 1000000000"),
        ({"chunk_tokens": 10**26}, "chunk_tokens is 1000.*000: give at most 1000000000"),
        ({"cache_host_layers": 10**10}, "cache_host_layers is 10000000000: give at most"),
        ({"memory_budget_gb": float("nan")}, "memory_budget_gb is nan"),
        ({"min_speedup": float("nan")}, "min_speedup is nan"),
        ({"chunk_tokens": -1}, "chunk_tokens is -1"),
        ({"segment_tokens": -1}, "segment_tokens is -1"),
        ({"min_gain": -1}, "min_gain is -1"),
        ({"align": 0}, "align is 0: give an integer from 1"),
        ({"align": 1.5}, "align is 1.5: give an integer"),
        ({"align": True}, "align is True: give an integer"),
        ({"align": 64, "chunk_tokens": 63}, "chunk_tokens 63 is below the alignment 64 of spans"),
        ({"run_ahead": True}, "run_ahead is True: give an integer"),
        ({"chunk_tokens": 1.5}, "chunk_tokens is 1.5: give an integer or 'auto'"),
        ({"segment_tokens": True}, "segment_tokens is True: give an integer or 'auto'"),
        ({"segment_tokens": "4k"}, "segment_tokens is '4k': give an integer or 'auto'"),
        ({"graph_tokens": -1}, "graph_tokens is -1: give a number from 0"),
        (
            {"graph_tokens": "auto"},
            "graph_tokens 'auto' needs mode 'auto': give that mode, or a number",
        ),
        ({"cache_host_layers": 1.5}, "cache_host_layers is 1.5: give an integer"),
        ({"min_gain": "64"}, "min_gain is '64': give an integer"),
        ({"min_gain": -1}, "min_gain is -1: give 0 or more"),
        ({"chunk_tokens": -1}, r"chunk_tokens is -1: give 0 \(no limit\) or more"),
        ({"memory_budget_gb": "3"}, "memory_budget_gb is '3': give a number"),
        ({"min_speedup": "2"}, "min_speedup is '2': give a number"),
        ({"loss_in_leaves": "no"}, "loss_in_leaves is 'no': give true or false"),
        ({"trainer_masks": 1}, "trainer_masks is 1: give true or false"),
        ({"kernel": None}, "kernel is None: give text"),
        ({"kernel": "foo"}, "attention kernel 'foo' is not auto, one of math, flash_cpu, .*, or a"),
        ({"kernel": "auto+math"}, "attention kernel 'auto.math' is not auto"),
        ({"kernel": "math+math+math"}, "attention kernel 'math.math.math' is not auto"),
        ({"mode": ["on"]}, r"mode is \['on'\]: give one of off"),
        ({"cost_file": 1}, "cost_file is 1: give text"),
    ],
)
def test_values_that_mean_nothing_are_refused(fields, message) -> None:
    with pytest.raises(UserError, match=message) as caught:
        PrefixConfig(**fields)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_negative_number_of_numpy_is_refused() -> None:
    with pytest.raises(UserError, match="graph_tokens is -1"):
        PrefixConfig(graph_tokens=np.int64(-1))


def test_the_tree_gets_what_the_user_set() -> None:
    config = PrefixConfig(chunk_tokens=512, segment_tokens=99, min_gain=7, loss_in_leaves=True)
    assert config.tree_options(8) == TreeOptions(8, 512, 99, 7, 32 * 7, True, "batch")
    assert PrefixConfig(min_gain=0).tree_options(1).segment_gain == 0  # everything is shared
    assert PrefixConfig(align=64).tree_options(24).boundary == 192


def test_chunks_are_no_shorter_than_the_alignment() -> None:
    assert PrefixConfig(chunk_tokens=4).tree_options(16).chunk_tokens == 16
    assert PrefixConfig(chunk_tokens=0).tree_options(16).chunk_tokens == 0
    assert PrefixConfig(chunk_tokens=64, align=64).tree_options(24).chunk_tokens == 192


def test_numbers_of_numpy_and_kernels_by_two_names_are_taken() -> None:
    numbers = PrefixConfig(chunk_tokens=np.int64(512), min_gain=np.int32(3), min_speedup=2)
    assert numbers == PrefixConfig(chunk_tokens=512, min_gain=3, min_speedup=2.0)
    assert PrefixConfig(kernel="flash_cpu+math").kernel == "flash_cpu+math"


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrefixConfig().mode = "off"  # type: ignore[misc]


ANSWERS = {
    "mode": "auto", "chunk_tokens": 512, "segment_tokens": 99, "min_gain": 7, "align": 64,
    "loss_in_leaves": True, "kernel": "math", "memory": "offload",
    "memory_budget_gb": 3.0, "cache_host_layers": 2, "cp_reduce": "segment", "run_ahead": 1,
    "across_ranks": "on", "graph_tokens": 4096, "watchdog_minutes": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("verb", ["train rollouts", "align --rollouts rollouts", "bench"])
def test_every_option_of_the_command_line_arrives(verb: str) -> None:
    """All fields but those of files, trainers and `min_speedup`; `mode` where the verb has it."""
    wanted = dict(ANSWERS) if verb.startswith("train") else {**ANSWERS, "mode": "on"}
    assert {f.name for f in dataclasses.fields(PrefixConfig)} - wanted.keys() == {
        "min_speedup", "plan_file", "cost_file", "trainer_masks", "verify",
    }  # fmt: skip
    name, *arguments = verb.split()
    for field, value in wanted.items():
        option = "--prefix-schedule" if field == "mode" else "--" + field.replace("_", "-")
        if field == "mode" and name != "train":
            continue
        arguments += [option] if value is True else [option, str(value)]
    assert config_of(make_parser(name).parse_args([name, *arguments])) == PrefixConfig(**wanted)
