"""The examples run as their docstrings say, and the one-line change of a trainer's loop is one."""

import contextlib
import importlib
import io
import json
import re
import runpy
import sys
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import how_it_works_picture
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import relative_error, tolerance
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness.data import BUNDLED, REPOSITORY
from tests.harness.fork_server import forked_module
from tests.harness.ranks import run_ranks

LOOP = REPOSITORY / "examples" / "existing_megatron_loop.py"


def counted(script):
    """A rank's part: what a script prints, and how many positions the prefix schedule had and
    computed in each step."""
    stock, counts = PrefixSchedule.__call__, []

    def counting(self, *arguments, **named):
        results = stock(self, *arguments, **named)
        forest = self.report.forest
        counts.append((forest.raw_tokens, forest.executed_tokens))
        return results

    PrefixSchedule.__call__ = counting  # in this process only
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue(), counts


def run(name, *arguments):
    done = forked_module(REPOSITORY / "examples" / name, *arguments, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan_a_step(tmp_path):
    picture = tmp_path / "plan.svg"
    said = run("plan_a_step.py", str(picture))
    # Each group: 2 rollouts of 639 positions, 2 of 895; its tree: 511 + 256 + 4 x 128.
    assert "6136 tokens, 2558 of them executed" in said
    assert "4: wave of 2, positions 767 to 894, rollouts [2, 3]" in said
    drawn, shown = (path.read_text("utf-8") for path in (picture, REPOSITORY / "docs/plan.svg"))
    assert drawn == shown, "python examples/plan_a_step.py docs/plan.svg"
    labels = [node.text for node in ElementTree.fromstring(drawn).iter() if node.text]
    assert all(labels.count(f"{kind}{number}") == 2 for kind in "FB" for number in range(10))


def test_the_picture_of_how_it_works_is_what_its_command_draws():
    shown = (REPOSITORY / "docs/how-it-works.svg").read_text("utf-8")
    assert shown == how_it_works_picture.picture()


def test_share_a_prompt():
    said = run("share_a_prompt.py")
    # 6 rollouts of 223 positions share 191: the label of the last prompt token is not shared.
    assert "tokens 1338, executed 383" in said
    assert "largest difference of a gradient" in said


def test_a_packed_forward_step():
    said = run("packed_forward_step.py")
    # 6 rollouts share 95 of their positions; their answers have 148 tokens.
    assert "tokens 718, executed 243" in said
    stock, shared = (
        [float(x) for x in re.findall(r"\d+\.\d+", line)]
        for line in said.splitlines()
        if line.startswith("losses")
    )
    assert len(stock) == 2 and shared == pytest.approx(stock, rel=tolerance(torch.float32, 718))


def test_parity_of_rollouts_is_proved():
    said = run("prove_parity.py", str(BUNDLED))
    assert said.rstrip().endswith("aligned") and "NOT" not in said
    raw, executed = map(int, re.search(r"tokens (\d+), executed (\d+)", said).groups())
    assert 0 < executed < raw / 2
    differences = [float(x) for x in re.findall(r": (\S+) \(at most", said)]
    assert len(differences) == 4 and max(differences) < 1e-11


def changed_loop():
    """The trainer's loop with the change that its own comment asks for."""
    text = LOOP.read_text(encoding="utf-8")
    (wanted,) = re.findall(r"^# {5}(from megatron_prefix import \w+)$", text, re.M)
    line = "from megatron.core.pipeline_parallel import get_forward_backward_func"
    assert text.count(f"\n{line}") == 1
    return text.replace(line, wanted)


def test_sharing_is_a_change_of_one_line_and_the_losses_stay(tmp_path):
    changed = tmp_path / "loop.py"
    changed.write_text(changed_loop(), encoding="utf-8")
    texts = (path.read_text(encoding="utf-8").splitlines() for path in (LOOP, changed))
    lines = zip(*texts, strict=True)
    assert sum(before != after for before, after in lines) == 1
    steps = []
    for script in (LOOP, changed):
        [(told, counts)] = run_ranks(1, counted, script)
        lines = told.splitlines()
        steps.append([[float(x) for x in re.findall(r"\d+\.\d+", line)] for line in lines])
    # 8 rollouts of 159 positions share 119 of them.
    assert counts == [(1272, 439)] * 3
    stock, shared = steps
    assert [len(step) for step in stock] == [2, 2, 2]
    for before, after in zip(stock, shared, strict=True):
        assert after == pytest.approx(before, rel=tolerance(torch.float32, 1272))
    assert stock[0] != stock[1]


def test_a_policy_trains_on_rollouts_of_its_own(tmp_path):
    sizes = {"demonstrated": 40, "records": 4, "updates": 2, "groups": 4, "prompt-tokens": 39}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    said = run("rl_run/run.py", "--output", str(tmp_path), "--runs", "stock", "prefix", *options)
    assert "stock and prefix: rewards differ by" in said
    lines = (tmp_path / "updates.jsonl").read_text("utf-8").splitlines()
    rows = [*map(json.loads, lines)]
    stock, shared = rows[:2], rows[2:]
    assert [row["run"] for row in rows] == ["stock"] * 2 + ["prefix"] * 2
    # From the same weights and seeds, and the first update is Megatron's: the same rollouts.
    assert stock[1]["raw_tokens"] == shared[1]["raw_tokens"]
    assert shared[1]["executed_tokens"] < stock[1]["executed_tokens"] / 2
    assert stock[1]["reward"] > 0 and stock[1]["grad_norm"] > 0
    for name in ("loss", "grad_norm", "entropy"):
        limit = tolerance(torch.float32, stock[1]["raw_tokens"])
        assert shared[1][name] == pytest.approx(stock[1][name], rel=limit, abs=limit)
    script = REPOSITORY / "examples" / "rl_run" / "run.py"
    again = forked_module(script, "--output", str(tmp_path), cwd=REPOSITORY)
    assert again.returncode == 2 and "has files already" in again.stderr
    for given, problem in (
        (("--start-from", str(tmp_path / "updates.jsonl")), "--start-from"),
        (("--runs", "none", "stock"), "leave the others out"),
    ):
        folder = tmp_path / "other"
        failed = forked_module(script, "--output", str(folder), *given, cwd=REPOSITORY)
        assert failed.returncode == 2 and problem in failed.stderr and not folder.exists()


@pytest.fixture
def sampler(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "rl_run")
    modules = [importlib.import_module(name) for name in ("records", "sampler")]
    yield modules
    for module in modules:
        del sys.modules[module.__name__]


def test_samples_are_of_the_models_own_distribution(sampler, on_one_rank):
    """What the cache says of a token is what a forward pass over all tokens says."""
    records, sampling = sampler
    task = records.Task(60, 4)
    asked = [task.records(1, 0, number)[0].prompt(0) for number in range(3)]
    prompts = torch.stack([torch.from_numpy(prompt).long() for prompt in asked])
    model = unwrap(build_model(resolve("tiny-llama", vocab_size=records.VOCABULARY))[0])
    told, draws = [], torch.Generator().manual_seed(0)
    stock = sampling._next
    sampling._next = lambda *arguments: told.append(stock(*arguments)) or told[-1]
    answers = sampling.sample(model, prompts, 4, 5, records.END, draws)
    sampling._next = stock
    assert model.training and len(answers.lists()) == 12
    tokens = torch.cat([prompts.repeat_interleave(4, 0), answers.tokens], 1)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        whole = model.eval()(tokens, positions, None)[:, prompts.shape[1] - 1 : -1]
    told[0] = told[0].repeat_interleave(4, 0)
    cached, limit = torch.stack(told, 1), tolerance(torch.float32, tokens.numel())
    assert relative_error(cached, whole) <= limit
    assert relative_error(cached[:, 1:], whole[:, :-1]) > limit
