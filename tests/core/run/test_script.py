"""`python -m megatron_prefix.run SCRIPT`: what the script sees, and what is passed through."""

import contextlib
import functools
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_prefix.lab.cli.script import main
from megatron_prefix.lab.numerics import tolerance
from tests.harness.data import REPOSITORY
from tests.harness.fork_server import forked_module
from tests.harness.ranks import run_ranks

LOOP = REPOSITORY / "examples" / "existing_megatron_loop.py"
SEEN = """\
import json, os, sys
import beside
heavy = sorted({"torch", "megatron"} & sys.modules.keys())
ours = {key: text for key, text in os.environ.items() if key.startswith("MEGATRON_PREFIX_")}
main = sys.modules["__main__"].__dict__ is globals()
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], heavy, ours, main]))
if "fail" in sys.argv:
    raise KeyError("of the script")
sys.exit(7)
"""


def run(*words, **environ):
    return subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("", encoding="utf-8")
    (tmp_path / "script.py").write_text(SEEN, encoding="utf-8")
    return str(tmp_path / "script.py")


def test_the_script_sees_its_own_words_folder_and_name(script):
    done = run(
        "-m", "megatron_prefix.run", "--prefix-schedule", "off", script, "--help", "--lr", "1",
        "--prefix-min-gain=3", "--prefix-of-its-own", "--prefix-memory", "offload",
        "--prefix-tokens=9",
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    name, file, argv, folder, heavy, ours, is_main = json.loads(done.stdout)
    assert (name, file, folder, heavy) == ("__main__", script, str(Path(script).parent), [])
    assert argv == [script, "--help", "--lr", "1", "--prefix-of-its-own", "--prefix-tokens=9"]
    assert is_main
    assert ours == {
        "MEGATRON_PREFIX_MODE": "off", "MEGATRON_PREFIX_MIN_GAIN": "3",
        "MEGATRON_PREFIX_MEMORY": "offload",
    }  # fmt: skip


def test_the_scripts_traceback_passes_through(script):
    done = run("-m", "megatron_prefix.run", script, "fail")
    assert done.returncode == 1
    *_, frame, line, error = done.stderr.splitlines()
    assert f'File "{script}", line 8' in "".join([frame, *done.stderr.splitlines()])
    assert (line.strip(), error) == ('raise KeyError("of the script")', "KeyError: 'of the script'")


@pytest.mark.parametrize(("words", "message"), [
    ([], "give a script"),
    (["--lr", "1", "train.py"], "give a script before --lr"),
    (["no-such-script.py"], "no-such-script.py: no such file"),
    ([__file__, "--prefix-schedule", "maybe"], "--prefix-schedule: mode is 'maybe': give one"),
    ([__file__, "--prefix-plan", "no-such.csv"], "--prefix-plan: no-such.csv: "),
    (
        [__file__, "--prefix-shedule", "off"],
        "--prefix-shedule: did you mean --prefix-schedule?",
    ),
    (["--prefix-aling", "8", __file__], "--prefix-aling: did you mean --prefix-align?"),
    ([__file__, "--prefix-plan"], "argument --prefix-plan: expected one argument"),
])  # fmt: skip
def test_bad_usage_is_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m megatron_prefix.run: {message}")


def said(done):
    """The steps that a loop's ranks have printed."""
    assert done.returncode == 0, done.stderr
    return steps_in(done.stdout)


def steps_in(text):
    """Number, loss and gradient norm of the steps in what ranks have printed, in order.

    Ranks write a line's end by itself, so two of them may share a line.
    """
    return sorted(re.findall(r"step (\d+): loss (\d+\.\d+), gradient norm (\d+\.\d+)", text))


def printed(script):
    """What a rank prints that runs a script without the module; forked, it has Megatron already."""
    torch.use_deterministic_algorithms(False)  # as in a process of its own
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(script, run_name="__main__")
    return out.getvalue()


def numbers(steps):
    return [float(text) for step in steps for text in step]


def test_off_is_stock_to_the_last_bit():
    expected = steps_in(*run_ranks(1, printed, str(LOOP)))
    words = str(LOOP), "--prefix-schedule", "off"
    done = forked_module("megatron_prefix.run", *words, cwd=REPOSITORY)
    assert said(done) == expected
    assert len(expected) == 3
    assert "mode off" in done.stderr


@pytest.mark.slow
def test_two_ranks_under_torchrun_train_as_stock(tmp_path):
    text = LOOP.read_text(encoding="utf-8")
    store = "    store = torch.distributed.HashStore()\n"
    alone = '("gloo", store=store, rank=0, world_size=1)'
    drawn = "    iterator = batches()\n"
    assert [text.count(part) for part in (store, alone, drawn)] == [1, 1, 1]
    text = text.replace(store, "").replace(alone, '("gloo")')
    text = text.replace(drawn, "    torch.manual_seed(torch.distributed.get_rank())\n" + drawn)
    text += '    if report := getattr(get_forward_backward_func(), "report", None):\n'
    text += "        ran = (report.forest.executed_tokens, report.forest.raw_tokens)\n"
    text += '        print("ran %d %d;" % ran)\n'  # one write: of ranks' prints only ends may mix
    script = tmp_path / "loop.py"
    script.write_text(text, encoding="utf-8")
    words = "--standalone", "--nproc-per-node", "2", "-m", "megatron_prefix.run", str(script)
    alike = tmp_path / "alike.py"  # ranks that are forked here meet in a file
    met = f'"gloo", init_method="file://{tmp_path}/met", rank=int(os.environ["RANK"]), world_size=2'
    alone = text.replace("import torch\n", "import os\n\nimport torch\n", 1)
    alike.write_text(alone.replace('("gloo")', f"({met})"), encoding="utf-8")
    stock = steps_in("".join(run_ranks(2, printed, str(alike))))
    torchrun = functools.partial(forked_module, "tests.harness.forking_torchrun", cwd=REPOSITORY)
    done = torchrun(*words, "--prefix-schedule", "on")
    assert numbers(said(done)) == pytest.approx(
        numbers(stock), rel=tolerance(torch.float32, 2 * 1272)
    )
    assert len(set(stock)) == 6  # of each rank other losses
    assert done.stdout.count("ran 439 1272;") == 2
    assert done.stderr.count("in a custom training loop") == 1  # on the first rank
    assert "mode on" in done.stderr
