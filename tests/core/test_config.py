"""What users set is checked once, with both values and the fix."""

import dataclasses

import pytest

from megatron_prefix.auto.settings import read_config
from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import MOST_LETTERS, UserError, bounded, listed
from megatron_prefix.lab.cli.arguments import config_of
from megatron_prefix.lab.cli.main import make_parser
from megatron_prefix.tree import TreeOptions
from tests.harness.command_line import BUNDLED, failure


@pytest.mark.parametrize(("fields", "message"), [
    ({"mode": "maybe"}, "mode is 'maybe': give one of off, observe, auto, on"),
    ({"memory": "forget"}, "memory is 'forget': give one of retain"),
    ({"run_ahead": 3}, "run_ahead is 3: give one of 1, 2"),
    ({"min_speedup": 0.0}, "min_speedup is 0.0: give a finite number above 0"),
    (
        {"memory_budget_gb": 1e-7},
        "memory_budget_gb is 1e-07, and no step runs in less than 1e-06: give GiB",
    ),
    ({"min_gain": 10**26}, "min_gain is 1000.*000: give at most 1000000000"),
    ({"cache_host_layers": 10**10}, "cache_host_layers is 10000000000: give at most"),
    ({"memory_budget_gb": float("nan")}, "memory_budget_gb is nan"),
    ({"align": 0}, "align is 0: give an integer from 1"),
    ({"align": 64, "chunk_tokens": 63}, "chunk_tokens 63 is below the alignment 64 of spans"),
    ({"chunk_tokens": 1.5}, "chunk_tokens is 1.5: give an integer or 'auto'"),
    ({"segment_tokens": "4k"}, "segment_tokens is '4k': give an integer or 'auto'"),
    ({"graph_tokens": -1}, "graph_tokens is -1: give a number from 0"),
    ({"graph_tokens": "all"}, "graph_tokens is 'all': give an integer or 'auto'"),
    ({"min_gain": -1}, "min_gain is -1: give 0 or more"),
    ({"chunk_tokens": -1}, r"chunk_tokens is -1: give 0 \(no limit\) or more"),
    ({"min_speedup": "2"}, "min_speedup is '2': give a number"),
    ({"loss_in_leaves": "no"}, "loss_in_leaves is 'no': give true or false"),
    ({"kernel": "foo"}, "attention kernel 'foo' is not auto, one of math, flash_cpu, .*, or a"),
    ({"kernel": "auto+math"}, "attention kernel 'auto.math' is not auto"),
    ({"cost_file": 1}, "cost_file is 1: give text"),
])  # fmt: skip
def test_values_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(UserError, match=message) as caught:
        PrefixConfig(**fields)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_the_tree_gets_what_the_user_set():
    config = PrefixConfig(chunk_tokens=512, segment_tokens=99, min_gain=7, loss_in_leaves=True)
    assert config.tree_options(8) == TreeOptions(8, 512, 99, 7, 32 * 7, True, "batch")
    assert PrefixConfig(min_gain=0).tree_options(1).segment_gain == 0  # everything is shared
    assert PrefixConfig(align=64).tree_options(24).boundary == 192


ANSWERS = {
    "mode": "auto", "chunk_tokens": 512, "segment_tokens": 99, "min_gain": 7, "align": 64,
    "loss_in_leaves": True, "kernel": "math", "memory": "offload",
    "memory_budget_gb": 3.0, "cache_host_layers": 2, "cp_reduce": "segment", "run_ahead": 1,
    "across_ranks": "on", "graph_tokens": 4096, "watchdog_minutes": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("verb", ["train rollouts", "align --rollouts rollouts", "bench"])
def test_every_option_of_the_command_line_arrives(verb):
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


# Messages are short, whatever a user gives: the begin, the fix, and how much is between -----------

LONG = "x" * 5000


def test_a_long_line_keeps_its_begin_and_its_fix():
    text = f"begin {LONG}; give less"
    line = bounded(text)
    assert line.startswith("begin xxx") and line.endswith("xxx; give less")
    assert "… 4,117 more characters …" in line and len(line) < MOST_LETTERS
    assert str(UserError(text)) == line == bounded(line)
    table = "\n".join([LONG, LONG])
    assert bounded(table).endswith(f"\n{LONG}"), "a table stays"
    assert bounded("x" * MOST_LETTERS) == "x" * MOST_LETTERS


def test_a_long_list_tells_how_many_more():
    assert listed([3, 1, 2]) == "1, 2, 3"
    assert listed(range(1024), 8) == "0, 1, 2, 3, 4, 5, 6, 7 and 1016 more"


@pytest.mark.parametrize("arguments", [
    ["plan", BUNDLED, "--model", LONG], ["plan", LONG], ["plan", BUNDLED, "--csv", LONG],
    ["plan", BUNDLED, "--pp", LONG], ["show", LONG], ["matrix", "--only", LONG],
    ["train", BUNDLED, "--set", f"{LONG}=1"], ["train", BUNDLED, "--memory", LONG],
    ["generate", "out", "--tree", LONG], [LONG],
], ids=lambda arguments: " ".join(arguments)[:30])  # fmt: skip
def test_no_line_of_the_command_line_is_long(capsys, arguments):
    assert len(failure(capsys, *arguments)) <= MOST_LETTERS + 100


def test_no_message_of_a_setting_is_long(tmp_path):
    file = tmp_path / "prefix.toml"
    for line in (f"mode = '{LONG}'", f"{LONG} = 1", f"plan = '{LONG}'", f"cost_file = '{LONG}'"):
        file.write_text(line, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            read_config({"MEGATRON_PREFIX_CONFIG": str(file)})
        assert len(str(caught.value)) <= MOST_LETTERS
