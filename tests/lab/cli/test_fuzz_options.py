"""Options of every verb with values that nobody means: success, or exit code 2 and one line.

The options are those of the parsers themselves, so a new one is tried without being named here.
What would run a model stops where its weights would be allocated.
"""

import argparse
import contextlib
import io
import itertools
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from megatron_prefix.lab import platforms, runtime
from megatron_prefix.lab.bench import work
from megatron_prefix.lab.cli import matrix, outputs
from megatron_prefix.lab.cli.main import VERBS, main, make_parser
from megatron_prefix.lab.data import generate
from megatron_prefix.lab.models import build
from megatron_prefix.lab.models.presets import PRESETS, ModelSpec
from tests.harness.command_line import BUNDLED, row
from tests.harness.fuzzing import rounds

# Times that an option is tried by itself, as --set with each field, and with others.
ALONE, FIELD, TOGETHER = rounds(1, 4), rounds(1, 3), rounds(6, 60)
NUMBERS = [
    *("nan", "inf", "-inf", "1e300", "1e-300", "1e400", "-0.0", "0.5", "1,5", "1_000", "0x10"),
    *("-1", "0", "1", "2", "3", "64", "1023", "2e9", "\uff11\uff12", "9" * 5000, "-" + "9" * 5000),
    *(str(2**power - less) for power in (31, 32, 63, 64) for less in (1, 0)),
    *(str(10**power) for power in (5, 9, 10, 20, 400)),
]
WORDS = ["", " ", "\n", "two\nlines", "x" * 5000, "é☃", "\udc80", "auto", "a+b", "..", "%s"]
FIELDS = [*ModelSpec.__dataclass_fields__, "no_such_field", ""]
SHAPES = [
    "1:1:1", "8:8:2:8", "1:2", "::", "0:8:8", "-1:8:8", "1e3:8:8", f"{10**12}:1:1", "8:8:1:1:1",
]  # fmt: skip
# What a verb writes gets no name of a device: run by root, a mistake would replace it.
FILES = ["", ".", "..", "x" * 300, "no/such/folder/file", "é☃.svg", "\udc80", "file\nname"]
WRITTEN = "out output csv svg plot bench_json result_json markdown record".split()
WRITTEN += "plan_svg trace cost_file".split()


class Accepted(BaseException):
    """The command line is good: a model would be built now."""


def one_group(path, groups):
    """Stands in for `write_rollouts`, which would go on for as many groups as are asked for."""
    return WRITE(path, itertools.islice(groups, 1))


WRITE = outputs.write_rollouts
# The package gives its function this name.
LAUNCH = sys.modules["megatron_prefix.lab.runtime.launch"]


def joined(layout, device, *args):
    """Stands in for `runtime.initialize`."""
    platform = platforms.select(device)
    return runtime.World(layout, platform, platform.device(), 0, layout.world_size)


def draw_a_weight(recipe, stage):
    """Stands in for building a part of the model."""
    torch.empty(1).normal_(0.0, recipe.spec.init_method_std)
    raise Accepted


def stop(*args, **options):
    raise Accepted


@pytest.fixture
def stopped(monkeypatch, tmp_path):
    """Nothing large is made, no rank is started, and files lie in the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runtime, "initialize", joined)
    monkeypatch.setattr(LAUNCH, "run_ranks", lambda fn, num, args, **options: fn(*args))
    monkeypatch.setattr(build, "build_chunk", draw_a_weight)
    monkeypatch.setattr(matrix, "align_row", stop)
    monkeypatch.setattr(outputs, "write_rollouts", one_group)
    for module in (generate, work):
        monkeypatch.setattr(module, "_MOST_TOKENS", 10**5)
    ids = json.loads(row())
    del ids["loss"]  # spans, which are of rollout files
    Path("ids.jsonl").write_text(json.dumps(ids), encoding="utf-8")
    assert outcome(["plan", BUNDLED, "--groups", "1", "--csv", "plan.csv"]) == (0, "")


SHORT = ["--prompt-tokens=16", "--response-tokens=64"]
BASES = {
    "plan": [BUNDLED, "--groups=1", "--max-tokens=64"], "show": ["plan.csv"],
    "align": ["--rollouts", BUNDLED, "--groups=1", "--max-tokens=64"],
    "matrix": ["--only", "dense/TP2/flat/none"],
    "train": [BUNDLED, "--groups=1", "--max-tokens=64"],
    "replay": [BUNDLED, "--groups=1", "--max-tokens=64"], "bench": ["--shapes=8:8:2"],
    "doctor": ["--device=cpu"], "generate": ["made.jsonl", "--overwrite", "--groups=1", *SHORT],
    "import": ["tokens", "ids.jsonl", "made.jsonl", "--overwrite"],
}  # fmt: skip


def outcome(argv):
    """Exit code, or the name of an exception, and what is on stderr."""
    code: int | str
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = main(argv)
        except Accepted:
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        except Exception as error:  # noqa: BLE001 - the failure this test is about
            code = f"{type(error).__name__}: {error}"
    return code, err.getvalue()


def options_of(verb):
    (verbs,) = (
        action
        for action in make_parser(verb)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    skipped = (argparse._HelpAction, argparse._VersionAction)
    found = [one for one in verbs.choices[verb]._actions if not isinstance(one, skipped)]
    # The first two write more lines. The last is of steps, which the base of `bench` has none of.
    return [one for one in found if one.dest not in ("progress", "verbose", "rehearse")]


def value(action, draw):
    if action.dest in WRITTEN:
        return draw.choice(FILES)
    if action.dest == "set":
        return f"{draw.choice(FIELDS)}={draw.choice([*NUMBERS, *WORDS, 'true'])}"
    if action.dest == "tokenizer":  # other names are looked for on the network
        return "no/such/folder/file.json"
    if action.dest == "model" and draw.random() < 0.7:
        return draw.choice(list(PRESETS))
    if action.dest == "shapes":
        return draw.choice(SHAPES)
    if action.choices and draw.random() < 0.8:
        return str(draw.choice(list(action.choices)))
    pool = NUMBERS if action.type is not None and draw.random() < 0.8 else [*WORDS, *FILES]
    return draw.choice(pool)


def command_lines(verb, draw):
    """Each option by itself, and then a few at a time."""
    options = options_of(verb)
    chosen = [[one] for one in options] * ALONE
    together = min(TOGETHER, 3 * len(options))  # a verb with few options has few pairs
    chosen += [draw.sample(options, draw.randint(1, min(4, len(options)))) for _ in range(together)]
    # Most of what --set can change is a number.
    chosen += [[one] for one in options if one.dest == "set"] * FIELD * len(FIELDS)
    for some in chosen:
        argv = [verb, *BASES[verb]]
        for one in some:
            if not one.option_strings:
                argv[1:2] = [value(one, draw)]
            elif one.nargs == 0:
                argv.append(one.option_strings[0])
            else:
                argv.append(f"{one.option_strings[0]}={value(one, draw)}")
        yield argv


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.usefixtures("stopped")
def test_success_or_one_line(verb):
    wrong, accepted = [], 0
    lines = list(command_lines(verb, random.Random(verb)))
    for argv in lines:
        code, err = outcome(argv)
        refused = code == 2 and err.count("\n") == 1 and err.endswith("\n")
        succeeded = code == 0 or (verb == "doctor" and code == 1 and not err)
        accepted += succeeded
        if not (refused or succeeded):
            wrong.append((code, err[-400:], [word[:60] for word in argv]))
    assert not wrong, "\n".join(map(str, wrong))
    assert accepted > len(lines) / 8  # else the values only meet argparse
