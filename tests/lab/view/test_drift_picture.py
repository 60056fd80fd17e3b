"""The verdict on a replay, its picture, and the verb's output and refusals."""

import json
import math
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megatron_prefix.lab.rl.updates import TrainingError
from megatron_prefix.lab.verify import replay
from megatron_prefix.lab.verify.replay import RUNS, Distance, ReplayStep, judged
from tests.harness.command_line import BUNDLED, forked, run
from tests.harness.one_rank import one_rank

CURVE = dict.fromkeys(RUNS, 0.5)
SMALL = ["--set", "num_layers=1", "--groups", "2", "--groups-per-step", "1", "--max-tokens", "80"]


def step(number=1, drift=3e-9, floor=2e-9, **fields):
    made = ReplayStep(
        number, CURVE, CURVE, Distance(*3 * [drift]), Distance(*3 * [floor]), 100, 40, CURVE,
        dict.fromkeys(RUNS, 0), 2,
    )  # fmt: skip
    return replace(made, **fields)


def test_twice_the_floor_is_the_limit_of_every_step():
    good = judged([step(), step(2, drift=4e-9)])
    assert good.passed and good.shared_steps == 2
    assert good.ratio_max == dict.fromkeys(("max", "mean", "rms"), pytest.approx(2.0))
    one = Distance(max=3e-9, mean=3e-9, rms=4.1e-9)
    bad = judged([step(), step(2, drift=3e-9), step(3, floor=4e-9), replace(step(4), drift=one)])
    assert not bad.passed
    (failed,) = bad.failures
    assert failed.startswith("rms difference: 1 of 4 steps exceed 2 times the noise floor, from")
    assert "step 4 on; most 2.05 times, step 4" in failed


@pytest.mark.parametrize(("drift", "floor"), [(math.nan, 1e-9), (1e-9, math.nan), (1e-9, 0.0)])
def test_nan_fails_and_so_does_a_floor_of_zero(drift, floor):
    result = judged([step(), step(2, drift, floor), step(3)])
    assert not result.passed and len(result.failures) == 3
    assert "1 of 3 steps" in result.failures[0] and "step 2" in result.failures[0]


EQUAL = step(drift=0.0, floor=0.0)
SKIPPED = dict(skipped={**dict.fromkeys(RUNS, 0), "stock": 2})
NO_NUMBERS = [
    ([step(), step(2, **{curve: {**CURVE, run: math.nan}})],
     f"of the {run} run is not finite in 1 of 2 steps, from step 2 on")
    for curve in ("loss", "weighted_logprob") for run in RUNS
]  # fmt: skip


@pytest.mark.parametrize(("steps", "message"), [
    ([EQUAL, replace(EQUAL, number=2)], "equal after every step, so there is no noise"),
    ([EQUAL, replace(EQUAL, number=2)], "(look at --lr)"),
    ([step(executed_tokens=100)], "the prefix schedule ran in no step: there is nothing to"),
    ([step(**SKIPPED), step(2, **SKIPPED)], "the stock run skipped all of its 4 updates"),
    *NO_NUMBERS,
])  # fmt: skip
def test_a_replay_that_proves_nothing_fails(steps, message):
    (failed,) = judged(steps).failures
    assert message in failed


def test_a_step_may_be_equal_and_some_updates_may_be_skipped():
    assert judged([EQUAL, step(2)]).passed
    some = {**SKIPPED["skipped"], "stock": 1}
    assert judged([step(skipped=some), step(2, **SKIPPED)]).passed
    assert not judged([]).passed


def test_a_run_that_ends_early_fails():
    def steps():
        yield step()
        raise TrainingError("step 2: loss nan")

    seen = []
    result = judged(steps(), seen.append)
    assert len(result.steps) == 1 and not (result.passed or result.ended)
    assert result.failures == ["step 2: loss nan"]
    (first,) = seen
    assert first.failures == ["the replay has not ended: these are its first 1 step"]
    assert first.ratio_max == result.ratio_max and not (first.passed or first.ended)


def test_the_picture_has_every_step():
    pytest.importorskip("matplotlib")
    from megatron_prefix.lab.view.drift import figure

    result = judged([step(1), step(2, drift=1e-8)])
    *measures, loss, logprob = figure(asdict(result)).axes
    for axes in measures:
        floor, limit, drift = (list(line.get_ydata()) for line in axes.lines)
        assert (floor, limit, drift) == ([2e-9, 2e-9], [4e-9, 4e-9], [3e-9, 1e-8])
    assert len(loss.lines) == len(logprob.lines) == 3


def test_json_table_and_files(tmp_path):
    pytest.importorskip("matplotlib")
    files = [str(tmp_path / name) for name in ("result.json", "plot.svg")]
    done = forked(
        "replay", BUNDLED, *SMALL, "--steps", "2", "--min-gain", "8", "--prefix-schedule", "on",
        "--adam-eps", "1e-5", "--result-json", files[0], "--plot", files[1], "--progress",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "within the noise" in done.stdout and "step 2 of 2: drift" in done.stderr
    result = json.loads(Path(files[0]).read_text("utf-8"))
    assert result["passed"] is result["ended"] is True and result["num_steps"] == 2
    assert [s["number"] for s in result["steps"]] == [1, 2]
    assert [(s["updates"], s["skipped"]["prefix"]) for s in result["steps"]] == [(1, 0)] * 2
    assert result["compared"] == "parameters" and result["groups_without_gradient"] == 0
    assert "<svg" in Path(files[1]).read_text("utf-8")


@pytest.fixture
def _interruptible():
    """A job in the background ignores SIGINT, and so would this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize(("ranks", "number", "code"), [
    (1, signal.SIGINT, 130), (2, signal.SIGINT, 130), (2, signal.SIGTERM, 143),
])  # fmt: skip
def test_files_of_a_replay_that_is_stopped_have_its_steps(
    ranks, number, code, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("matplotlib")
    launcher = os.getpid()

    def replayed(runs, steps):
        yield from (step(1), step(2))
        if os.environ.get("RANK", "0") == "0":
            os.kill(launcher, number)
        time.sleep(30)

    monkeypatch.setattr(replay, "trainers", lambda *_: {})
    monkeypatch.setattr(replay, "replayed", replayed)
    found, drawn = tmp_path / "result.json", tmp_path / "plot.svg"
    found.write_text('{"passed": true}', "utf-8")  # of a run before
    options = ["--tp", str(ranks), "--result-json", str(found), "--plot", str(drawn)]
    ended, _, _ = run(capsys, "replay", BUNDLED, *SMALL, *options)
    assert ended == code
    result = json.loads(found.read_text("utf-8"))
    assert [s["number"] for s in result["steps"]] == [1, 2] and result["num_steps"] == 100
    assert result["ended"] is False and result["passed"] is False
    assert result["failures"] == ["the replay has not ended: these are its first 2 steps"]
    assert "<svg" in drawn.read_text("utf-8")
    assert sorted(tmp_path.iterdir()) == [drawn, found]


def test_distances_are_those_of_all_elements():
    ones = [torch.tensor([1.0, 2.0]), torch.tensor([[5.0]])]
    others = [torch.tensor([1.0, -1.0]), torch.tensor([[9.0]])]
    with one_rank():
        found = replay.distance(ones, others, torch.device("cpu"))
    assert (found.max, found.mean) == (4.0, 7 / 3) and found.rms == pytest.approx((25 / 3) ** 0.5)
