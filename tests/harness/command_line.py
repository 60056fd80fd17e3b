"""Calls the command line, in this process or in a new one, and makes rows of rollout files."""

import contextlib
import io
import json
import subprocess
import sys

from megatron_prefix.lab.cli.main import main
from tests.harness import data
from tests.harness.fork_server import forked_module

BUNDLED = str(data.BUNDLED)


def run(capsys, *arguments):
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def captured(*arguments):
    """The same of a command line in a process that pytest does not look at, as a rank's is."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def result(capsys, *arguments):
    """The JSON that a verb prints with --json; nothing else may be printed."""
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def failure(capsys, *arguments, out=""):
    """The one line on stderr with which a command line fails."""
    code, printed, err = run(capsys, *arguments)
    assert (code, printed) == (2, out)
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err[:-1]


def forked(*arguments):
    """A command in a process of its own, which has imported all it needs; see fork_server.py."""
    return forked_module("megatron_prefix", *arguments, cwd=data.REPOSITORY)


def printed(*arguments):
    """The JSON that such a command prints."""
    done = forked(*arguments, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def command(*arguments, **options):
    """A command as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_prefix", *arguments], cwd=data.REPOSITORY,
        capture_output=True, text=True, timeout=120, check=False, **options,
    )  # fmt: skip


def script(path, *arguments, **environment):
    """A shell script with these variables alone."""
    return subprocess.run(
        ["bash", str(path), *map(str, arguments)], env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def row(**changes):
    fields = {
        "group": "g", "uid": "0", "tokens": [1, 2, 3], "prompt_len": 1, "loss": [[1, 3]],
        "reward": 1.0,
    }  # fmt: skip
    return json.dumps({key: v for key, v in {**fields, **changes}.items() if v is not None}) + "\n"
