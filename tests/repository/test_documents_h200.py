"""The script of other documents' shapes, with a python3 that only notes what it is asked to do."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks import calls
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.cli.main import make_parser
from megatron_prefix.lab.cli.modelling import model_options
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.rollouts import read_rollouts, write_rollouts
from megatron_prefix.lab.models import presets
from tests.harness.data import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "documents_h200.sh"


def run(folder, *rows, status=0):
    """The script; what it asked of python3 is in `folder/notes`."""
    python = folder / "python3"
    note = f'#!/bin/bash\necho "${{@@Q}}" >>{folder}/notes\nexit {status}\n'
    python.write_text(note, encoding="utf-8")
    python.chmod(0o755)
    return subprocess.run(
        ["bash", str(SCRIPT), str(folder), str(folder / "out"), *rows],
        env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def asked(folder, module, verb):
    """The verb and arguments of every call of it."""
    lines = [shlex.split(line) for line in (folder / "notes").read_text("utf-8").splitlines()]
    assert all(line[0] == "-m" for line in lines)
    return [line[2:] for line in lines if line[1] == module and line[2] == verb]


ROWS = "caching dualkv_layer dualkv_step dualkv_logprob moe_step moe_logprob dta"


@pytest.mark.parametrize(("rows", "num"), [("", 7), (f"{ROWS} capacity", 8)])
def test_every_row_is_a_command_that_bench_takes(tmp_path, rows, num):
    done = run(tmp_path, *rows.split())
    assert done.returncode == 0, done.stderr
    commands = asked(tmp_path, "megatron_prefix", "bench")
    for arguments in commands:
        args = make_parser("bench").parse_args(arguments)
        assert (args.device, args.dtype) == ("cuda", "bfloat16")
        options = model_options(args)
        assert presets.resolve(options.model, **dict(options.overrides)).vocab_size
        assert args.shapes or args.rollouts
        assert all(GroupShape.parse(text) for text in args.shapes)
    written = [make_parser("bench").parse_args(one).bench_json for one in commands]
    names = [Path(path).stem for path in written]
    assert names == (rows or ROWS).split() and len(names) == num


def test_files_that_are_timed_are_made_first(tmp_path):
    assert run(tmp_path, "dualkv_layer").returncode == 0
    [arguments] = asked(tmp_path, "megatron_prefix", "bench")
    made = [one[1] for one in asked(tmp_path, "megatron_prefix", "generate")]
    assert make_parser("bench").parse_args(arguments).rollouts == made and len(made) == 4


def test_a_failed_row_fails_the_script_and_the_others_run(tmp_path):
    assert run(tmp_path, "moe_step", "caching", status=1).returncode == 1
    assert len(asked(tmp_path, "megatron_prefix", "bench")) == 2


def test_an_unknown_row_is_refused(tmp_path):
    done = run(tmp_path, "dualkv")
    assert done.returncode == 2 and "dualkv: not one of the rows" in done.stderr


def test_calls_end_where_they_are_trained(tmp_path):
    source, target = tmp_path / "rollouts.jsonl.gz", tmp_path / "calls.jsonl.gz"
    groups = list(generate(2, 64, 96, 3, tree="turns", depth=3))
    write_rollouts(source, groups)
    assert calls.main([str(source), str(target)]) == 0
    found = list(read_rollouts(target))
    wanted = [(r, span) for group in groups for r in group.rollouts for span in r.loss]
    assert len(found) == len(wanted) > sum(len(group.rollouts) for group in groups)
    for one, (rollout, (start, end)) in zip(found, wanted, strict=True):
        assert (one.group, one.loss, one.reward) == (rollout.group, ((start, end),), rollout.reward)
        assert one.tokens.tolist() == rollout.tokens[:end].tolist()
    assert len({(one.group, one.uid) for one in found}) == len(found)


def test_calls_wants_two_files(capsys):
    assert calls.main(["one"]) == 2
    assert "give two files" in capsys.readouterr().err
