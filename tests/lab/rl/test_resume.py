"""Training runs that stop and go on: exact resume, and what is not resumed."""

import multiprocessing
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.rl import checkpoint, run_folder
from megatron_prefix.lab.rl.checkpoint import Identity
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.rl.run_folder import LOCK, claimed
from megatron_prefix.lab.runtime import Layout
from tests.harness import training
from tests.harness.ranks import forked
from tests.harness.training import bundled, metrics_of, settings, train


@pytest.mark.parametrize(("fields", "dp"), [
    ({"mode": "on", "ppo_epochs": 2, "num_minibatches": 2, "loss_mean": "rollout"}, 1),
    ({"mode": "on", "distributed_optimizer": True}, 2),
], ids=["epochs", "distributed-optimizer"])  # fmt: skip
def test_resume_is_exact(tmp_path, fields, dp):
    job = settings(**fields)
    layout = Layout(dp=dp)
    through = train(tmp_path / "a", 3, job, layout=layout, look=training.whole_state)
    train(tmp_path / "b", 2, job, layout=layout, save_every=2)
    again = train(tmp_path / "b", 3, job, layout=layout, look=training.whole_state, resume="auto")
    for (one, state), (other, resumed) in zip(through, again, strict=True):
        assert one.last_step == other.last_step == other.first_step == 3
        training.assert_same(state, resumed)
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")


def test_resume_on_another_number_of_ranks(tmp_path):
    """Sums over ranks round otherwise, so the weights are the same and what follows is close."""
    job = settings(distributed_optimizer=True, lr=1e-3)
    (one,) = train(tmp_path, 2, job, save_every=2)
    assert one[0].checkpoint is not None
    for dp in (1, 2):
        folder = tmp_path / f"dp{dp}"
        shutil.copytree(tmp_path / "checkpoints", folder / "checkpoints")
        train(folder, 3, job, layout=Layout(dp=dp), resume="auto")
    losses = [metrics_of(tmp_path / f"dp{dp}")[-1]["train/loss"] for dp in (1, 2)]
    assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), 2000)


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one step")
    train(folder, 1, settings(), save_every=1)
    return folder


def other_reward():
    """The same vocabulary, so that only the rollouts differ."""
    first, *others = bundled()
    changed, *rest = first.rollouts
    return [replace(first, rollouts=(replace(changed, reward=0.25), *rest)), *others]


@pytest.mark.parametrize(("groups", "options", "message"), [
    (bundled, ModelOptions("tiny-llama"),
     "was made with another model .*num_layers 2 there, 4 here"),
    (other_reward, training.SMALL, "made from other rollouts"),
    (bundled, replace(training.SMALL, dtype="float64"), "has dtype float32, this run float64"),
], ids=["model", "rollouts", "dtype"])  # fmt: skip
def test_something_else_is_not_resumed(one_step, groups, options, message):
    before = sorted(one_step.rglob("*"))
    with pytest.raises(UserError, match=message):
        train(one_step, 2, settings(clip_grad=0.0), groups(), options=options, resume="auto")
    assert sorted(one_step.rglob("*")) == before


def test_a_half_written_checkpoint_is_not_picked_up(tmp_path, one_step):
    job = settings()
    shutil.copytree(one_step, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoints"

    def fail_to_save(trainer):
        def save(state, path):
            (Path(path) / "__0_0.distcp").write_bytes(b"half")
            raise KeyboardInterrupt

        checkpoint.dist_checkpointing.save = save
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(trainer, tmp_path, Identity({}, "", 0, "", False))

    train(tmp_path, 2, job, resume="auto", look=fail_to_save)
    assert (folder / "step-000002.part").is_dir()
    assert run_folder.find(tmp_path) == folder / "step-000001"
    with pytest.raises(UserError, match="not a complete checkpoint"):
        run_folder.find(folder / "step-000002.part")
    ((summary, _),) = train(tmp_path, 2, job, resume="auto", save_every=1)
    assert summary.first_step == 2 and run_folder.find(tmp_path) == folder / "step-000002"
    assert not list(folder.glob("*.part")) and not list(folder.glob("*.old"))


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path, one_step):
    job = settings()
    shutil.copytree(one_step, tmp_path, dirs_exist_ok=True)
    with pytest.raises(UserError, match="holds the checkpoints of a run; add --resume"):
        train(tmp_path, 2, job)
    with pytest.raises(UserError, match="at step 1 already; give more"):
        train(tmp_path, 1, job, resume="auto")
    with pytest.raises(UserError, match="holds no checkpoint"):
        train(tmp_path / "x", 1, job, resume=str(tmp_path / "tensorboard"))


# A run's folder has one writer at a time ----------------------------------------------------------


def hold(folder, pipe):
    with claimed(folder):
        pipe.send("ready")
        pipe.recv()


@pytest.fixture
def holder(tmp_path):
    here, there = multiprocessing.Pipe()
    process = forked(hold, tmp_path / "run", there)
    assert here.poll(30)
    yield process, here
    process.kill()
    process.join()


def test_another_run_is_refused_with_the_holder(tmp_path, holder):
    process, pipe = holder
    with (
        pytest.raises(UserError, match=f"process {process.pid} on {socket.gethostname()}"),
        claimed(tmp_path / "run"),
    ):
        pass
    assert os.listdir(tmp_path / "run") == [LOCK]
    pipe.send("leave")
    process.join()
    assert not (tmp_path / "run").exists()
    with claimed(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).read_text("utf-8") == f"process {os.getpid()} on " + (
            socket.gethostname()
        )


def test_a_lock_dies_with_its_holder(tmp_path, holder):
    process, _ = holder
    process.kill()
    process.join()
    assert os.listdir(tmp_path / "run") == [LOCK]
    with claimed(tmp_path / "run"):
        (tmp_path / "run" / "file").touch()
    assert os.listdir(tmp_path / "run") == ["file"]


def test_metrics_of_another_run_are_kept(tmp_path):
    """With --resume, too, where there is no checkpoint; --overwrite says what is wanted."""
    metrics, part = tmp_path / "run" / "metrics.jsonl", settings(groups_per_step=1)
    train(tmp_path / "run", 1, part)
    before, there = metrics.read_bytes(), sorted(tmp_path.rglob("*"))
    for resume in (None, "auto"):
        with pytest.raises(UserError, match="metrics of a run and no checkpoint; add --overwrite"):
            train(tmp_path / "run", 2, part, resume=resume)
    assert metrics.read_bytes() == before and sorted(tmp_path.rglob("*")) == there
    train(tmp_path / "run", 2, part, overwrite=True)
    assert len(metrics.read_bytes().splitlines()) == 2
    train(tmp_path / "run", 1, part, resume="auto", overwrite=True)
    assert len(metrics.read_bytes().splitlines()) == 1


def test_a_lock_is_never_another_file(tmp_path):
    """It is emptied, so a link of its name would cost what it names."""
    thesis, lock = tmp_path / "thesis", tmp_path / "run" / LOCK
    thesis.write_text("mine", encoding="utf-8")
    lock.parent.mkdir()
    for make in (
        lambda: lock.symlink_to(thesis),
        lambda: lock.symlink_to(tmp_path / "missing"),
        lambda: lock.hardlink_to(thesis),
        lambda: os.mkfifo(lock),
    ):
        make()
        with pytest.raises(UserError, match=f"{lock}: is not a plain file"), claimed(lock.parent):
            pass
        assert os.path.lexists(lock)
        lock.unlink()
    assert sorted(os.listdir(tmp_path)) == ["run", "thesis"]
    assert thesis.read_text("utf-8") == "mine"
