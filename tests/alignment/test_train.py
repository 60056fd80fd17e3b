"""Training runs: exact resume, both schedules on the same updates, ranks, and what goes wrong."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_prefix import runtime
from megatron_prefix.config import PrefixConfig
from megatron_prefix.data.rollouts import Group, Rollout, read_groups
from megatron_prefix.data.shorten import shorten
from megatron_prefix.errors import UserError
from megatron_prefix.jobs import ModelOptions, fit_vocabulary
from megatron_prefix.numerics import assert_close
from megatron_prefix.rl import checkpoint, compare, updates
from megatron_prefix.rl.checkpoint import Identity
from megatron_prefix.rl.dataset import RolloutSet
from megatron_prefix.rl.loss import GrpoConfig
from megatron_prefix.rl.run import run
from megatron_prefix.rl.settings import RunOptions, TrainSettings
from megatron_prefix.rl.trainer import Trainer
from megatron_prefix.runtime import Layout
from tests.harness.data import BUNDLED
from tests.harness.ranks import run_ranks

SMALL = ModelOptions("tiny-llama", overrides=(("num_layers", 2),))
TIMES = ("train/updates_s", "train/logprobs_s", "train/step_s", "prefix_sharing/stock_updates_s")


def bundled() -> list[Group]:
    """The first bundled groups, cut short; five, so that two steps of two end in the middle."""
    groups = itertools.islice(read_groups(BUNDLED), 5)
    return [kept for group in groups if (kept := shorten(group, 120)[0])]


def settings(**fields: Any) -> TrainSettings:
    """A run whose every part has something to do."""
    mode = fields.pop("mode", "on")
    values: dict[str, Any] = dict(
        groups_per_step=2,
        lr=1e-2,
        warmup_steps=3,
        grpo=GrpoConfig(kl_coeff=0.05),
        prefix=PrefixConfig(mode=mode, min_gain=8),
    )
    return TrainSettings(**{**values, **fields})


def train(
    folder: Path,
    steps: int,
    train_settings: TrainSettings,
    groups: list[Group] | None = None,
    *,
    layout: Layout = Layout(),  # noqa: B008  # frozen
    options: ModelOptions = SMALL,
    look: Callable[[Trainer], Any] = lambda trainer: compare.parameters(trainer.chunks),
    **more: Any,
) -> list[tuple[Any, Any]]:
    """Runs a job in fresh processes; per rank the summary, and what `look` found at the end."""
    spec, fitted = fit_vocabulary(options, groups or bundled())

    def on_rank() -> tuple[Any, Any]:
        world = runtime.initialize(layout, "cpu", options.seed)
        rollouts = RolloutSet(tuple(fitted))
        trainer = Trainer(train_settings, rollouts, options, spec, world)
        distributed = train_settings.distributed_optimizer
        identity = Identity(
            asdict(spec), options.dtype, options.seed, rollouts.fingerprint, distributed
        )
        summary = run(trainer, RunOptions(steps, folder, **more), identity, lambda step: None)
        return summary, look(trainer)

    return run_ranks(layout.world_size, on_rank)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [name for name in rows[0] if name.endswith("_per_s")]
    return [{n: v for n, v in row.items() if n not in (*TIMES, *rates)} for row in rows]


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state."""
    found = compare.parameters(trainer.chunks)
    for chained in trainer.optimizer.chained_optimizers:
        parameters = [p for group in chained.optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            for name, value in chained.optimizer.state[parameter].items():
                found[f"{number}.{name}"] = value.clone()
    return found


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Bit by bit."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# Resume -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "dp"),
    [
        ({"mode": "off"}, 1),
        ({"mode": "on"}, 1),
        ({"mode": "on", "ppo_epochs": 2, "num_minibatches": 2, "loss_mean": "rollout"}, 1),
        ({"mode": "on", "distributed_optimizer": True}, 2),
    ],
    ids=["stock", "prefix", "epochs", "distributed optimizer"],
)
def test_resume_is_exact(tmp_path: Path, fields: dict[str, Any], dp: int) -> None:
    job = settings(**fields)
    layout = Layout(dp=dp)
    through = train(tmp_path / "a", 4, job, layout=layout, look=whole_state)
    train(tmp_path / "b", 2, job, layout=layout, save_every=2)
    again = train(tmp_path / "b", 4, job, layout=layout, look=whole_state, resume="auto")
    for (one, state), (other, resumed) in zip(through, again, strict=True):
        assert one.last_step == other.last_step == 4 and other.first_step == 3
        assert_same(state, resumed)
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")


def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
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


def test_random_generators_go_on(tmp_path: Path) -> None:
    """Nothing in these models draws; so the generators are asked themselves."""

    def draws(trainer: Trainer) -> tuple[float, float]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            forked = torch.rand(()).item()
        return forked, torch.rand(()).item()

    def disturb_and_save(trainer: Trainer) -> tuple[float, float]:
        torch.rand(17)
        identity = Identity({}, "float32", 0, "", False)
        checkpoint.save(trainer, tmp_path, identity)
        return draws(trainer)

    def load_and_draw(trainer: Trainer) -> tuple[float, float]:
        found = checkpoint.find(tmp_path)
        assert found is not None
        checkpoint.load(trainer, found, Identity({}, "float32", 0, "", False))
        return draws(trainer)

    job = settings()
    ((_, before),) = train(tmp_path / "a", 1, job, look=disturb_and_save)
    ((_, after),) = train(tmp_path / "b", 1, job, look=load_and_draw)
    ((_, fresh),) = train(tmp_path / "c", 1, job, look=draws)
    assert after == before != fresh


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model", "of another model .*num_layers 2 there, 4 here"),
        ("rollouts", "made from other rollouts"),
        ("seed", "has seed 1234, this run 7"),
        ("dtype", "has dtype float32, this run float64"),
    ],
)
def test_something_else_is_not_resumed(tmp_path: Path, change: str, message: str) -> None:
    job = settings(clip_grad=0.0)
    train(tmp_path, 1, job, save_every=1)
    options = {
        "model": ModelOptions("tiny-llama"),
        "seed": replace(SMALL, seed=7),
        "dtype": replace(SMALL, dtype="float64"),
    }.get(change, SMALL)
    groups = None
    if change == "rollouts":  # the same vocabulary, so that only the rollouts differ
        groups = bundled()
        groups[0] = replace(
            groups[0],
            rollouts=(replace(groups[0].rollouts[0], reward=0.25), *groups[0].rollouts[1:]),
        )
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        train(tmp_path, 2, job, groups, options=options, resume="auto")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_half_written_checkpoint_is_not_picked_up(tmp_path: Path) -> None:
    job = settings()
    train(tmp_path, 1, job, save_every=1)
    folder = tmp_path / "checkpoints"

    def fail_to_save(trainer: Trainer) -> None:
        def save(state: Any, path: str) -> None:
            (Path(path) / "__0_0.distcp").write_bytes(b"half")
            raise OSError("no space left on device")

        checkpoint.dist_checkpointing.save = save
        with pytest.raises(OSError, match="no space"):
            checkpoint.save(trainer, tmp_path, Identity({}, "", 0, "", False))

    train(tmp_path, 2, job, resume="auto", look=fail_to_save)
    assert (folder / "step-000002.part").is_dir()
    assert checkpoint.find(tmp_path) == folder / "step-000001"
    with pytest.raises(UserError, match="not a complete checkpoint"):
        checkpoint.find(folder / "step-000002.part")
    ((summary, _),) = train(tmp_path, 2, job, resume="auto", save_every=1)
    assert summary.first_step == 2 and checkpoint.find(tmp_path) == folder / "step-000002"
    assert not list(folder.glob("*.part")) and not list(folder.glob("*.old"))


def test_where_to_resume_from(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step-000003"
    assert checkpoint.find(tmp_path) is None
    step.mkdir(parents=True)
    (step / "train.json").write_text("{}")
    (tmp_path / "checkpoints" / "latest").write_text("step-000003\n")
    for place in (tmp_path, tmp_path / "checkpoints", step):
        assert checkpoint.find(place) == step
    shutil.rmtree(step)
    with pytest.raises(UserError, match="names step-000003, which is not there"):
        checkpoint.find(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.find(tmp_path / "nowhere")


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    job = settings()
    train(tmp_path, 1, job, save_every=1)
    with pytest.raises(UserError, match="holds the checkpoints of a run; add --resume"):
        train(tmp_path, 2, job)
    with pytest.raises(UserError, match="at step 1 already; give more"):
        train(tmp_path, 1, job, resume="auto")
    with pytest.raises(UserError, match="holds no checkpoint"):
        train(tmp_path / "x", 1, job, resume=str(tmp_path / "tensorboard"))


# Both schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_both_schedules_make_the_same_updates(tmp_path: Path, model: str) -> None:
    """The bundled file, whole rollouts, in fp32; the verdict is the numerics policy's."""
    groups = list(read_groups(BUNDLED))
    job = settings(compare=True, groups_per_step=4, prefix=PrefixConfig())
    ((summary, _),) = train(tmp_path, 2, job, groups, options=ModelOptions(model))
    assert summary.passed is True and not summary.failures
    assert 0 < summary.grad_max_rel_diff <= summary.tolerance < 1e-4
    assert summary.raw_tokens == sum(len(r) - 1 for g in groups for r in g.rollouts)
    assert summary.executed_tokens < 0.5 * summary.raw_tokens
    assert summary.speedup > 0 and summary.stock_step_s > 0


def test_both_schedules_agree_in_float64(tmp_path: Path) -> None:
    job = settings(compare=True, ppo_epochs=2, num_minibatches=2, clip_grad=0.0, lr=1e-3)
    options = replace(SMALL, dtype="float64")
    ((summary, _),) = train(tmp_path, 2, job, options=options)
    assert summary.passed is True and summary.grad_max_rel_diff < 1e-12
    assert summary.loss_max_abs_diff < 1e-12


def test_a_wrong_schedule_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = updates.forward_step
    calls = iter(range(100))

    def wrong_every_second_time(config: GrpoConfig, weight: float) -> Any:
        return make(config, weight=weight * (1 + 1e-3 * (next(calls) % 2)))

    monkeypatch.setattr(updates, "forward_step", wrong_every_second_time)
    ((summary, _),) = train(tmp_path, 1, settings(compare=True))
    assert summary.passed is False and "gradient of" in summary.failures[0]
    assert summary.grad_max_rel_diff == pytest.approx(1e-3, rel=0.1)


def test_comparing_changes_nothing(tmp_path: Path) -> None:
    """The stock schedule's update is taken back without a trace."""
    plain = train(tmp_path / "a", 3, settings(), look=whole_state)
    beside = train(tmp_path / "b", 3, settings(compare=True), look=whole_state)
    assert_same(plain[0][1], beside[0][1])


def test_copies_whose_advantages_cancel(tmp_path: Path) -> None:
    tokens = np.arange(5, 60, dtype=np.int32)
    copies = [Rollout("copies", str(i), tokens, 30, ((30, 55),), float(i == 0)) for i in range(3)]
    one = replace(copies[0], group="one")
    groups = [Group("copies", tuple(copies)), Group("one", (one,))]
    job = settings(compare=True, groups_per_step=1)
    ((summary, _),) = train(tmp_path, 2, job, groups)
    assert summary.passed is True
    rows = metrics_of(tmp_path)
    assert [row["prefix_sharing/executed_tokens"] for row in rows] == [54, 54]
    assert [row["prefix_sharing/raw_tokens"] for row in rows] == [3 * 54, 54]


# Ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_mean", ["token", "rollout"])
@pytest.mark.parametrize("mode", ["off", "on"])
def test_data_parallel_ranks_make_the_same_update(
    tmp_path: Path, loss_mean: str, mode: str
) -> None:
    """Groups of different sizes: ranks have different numbers of rollouts and of tokens."""
    groups = bundled()[:2]
    assert len({len(group.rollouts) for group in groups}) == 2
    job = settings(mode=mode, loss_mean=loss_mean, clip_grad=0.0)
    found = [
        train(
            tmp_path / f"dp{dp}",
            1,
            job,
            groups,
            layout=Layout(dp=dp),
            look=lambda trainer: compare.gradients(trainer.chunks),
        )
        for dp in (1, 2)
    ]
    num_tokens = found[0][0][0].raw_tokens
    for _, gradients in found[1]:
        for name, wanted in found[0][0][1].items():
            assert_close(gradients[name], wanted, num_tokens, what=name)
    rows = [metrics_of(tmp_path / f"dp{dp}")[0] for dp in (1, 2)]
    for name in ("prefix_sharing/raw_tokens", "prefix_sharing/executed_tokens"):
        assert rows[0][name] == rows[1][name]
    for name in ("train/loss", "train/kl", "train/ratio"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-5)


def test_context_parallel_ranks_train_as_one(tmp_path: Path) -> None:
    """Two steps, compared with the stock schedule; old log-probs are the model's and given ones."""
    first, second = bundled()[:2]
    given = tuple(
        replace(rollout, old_logprobs=np.full(rollout.num_trained, -3.0))
        for rollout in second.rollouts
    )
    groups = [first, Group(second.name, given)]
    job = settings(compare=True)
    for cp in (1, 2):
        for summary, _ in train(tmp_path / f"cp{cp}", 2, job, groups, layout=Layout(cp=cp)):
            assert summary.passed is True
    rows = [metrics_of(tmp_path / f"cp{cp}")[-1] for cp in (1, 2)]
    for name in ("train/loss", "train/kl", "train/ratio", "train/grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-4), name
    for name in ("prefix_sharing/raw_tokens", "prefix_sharing/executed_tokens"):
        padding = rows[1][name] - rows[0][name]
        assert 0 <= padding < 4 * sum(len(group.rollouts) for group in groups), name


@pytest.mark.parametrize("loss_mean", ["token", "rollout"])
@pytest.mark.parametrize("case", ["cut", "idle"])
def test_a_cut_group_and_an_idle_rank_change_no_update(
    tmp_path: Path, loss_mean: str, case: str
) -> None:
    """One group on two ranks: a part each, or all on one where cutting it would gain nothing."""
    (group, *_) = bundled()
    rollouts = group.rollouts if case == "cut" else (group.rollouts[0],)
    groups = [Group(group.name, tuple(replace(r, reward=float(i)) for i, r in enumerate(rollouts)))]
    if case == "idle":  # alone in its group it would have no advantage
        groups[0] = Group(group.name, (replace(rollouts[0], advantage=1.5),))
    job = settings(loss_mean=loss_mean, clip_grad=0.0, groups_per_step=1)
    found = [
        train(
            tmp_path / f"dp{dp}",
            1,
            job,
            groups,
            layout=Layout(dp=dp),
            look=lambda trainer: compare.gradients(trainer.chunks),
        )
        for dp in (1, 2)
    ]
    ((alone, gradients),) = found[0]
    for summary, others in found[1]:
        more = summary.executed_tokens - alone.executed_tokens
        assert (more > 10) == (case == "cut"), "both parts compute the prompt"
        for name, wanted in gradients.items():
            assert_close(others[name], wanted, alone.raw_tokens, what=name)
    rows = [metrics_of(tmp_path / f"dp{dp}")[0] for dp in (1, 2)]
    for name in ("train/loss", "train/reward_mean", "train/grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-4, abs=1e-5)


def test_what_a_layout_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no multiple of --minibatches 2"):
        train(tmp_path, 1, settings(groups_per_step=3, num_minibatches=2))
    with pytest.raises(UserError, match="groups-per-step 100 exceeds"):
        train(tmp_path, 1, settings(groups_per_step=100))
    with pytest.raises(
        UserError, match=r"--cp 2 with --loss-mean rollout: .* use --loss-mean token"
    ):
        train(tmp_path, 1, settings(loss_mean="rollout"), layout=Layout(cp=2))
    odd = settings(mode="off", groups_per_step=1)
    copies = bundled()[0].rollouts[:3]
    with pytest.raises(UserError, match="multiples of --pp 2, and there are 3"):
        train(
            tmp_path,
            1,
            odd,
            [Group(copies[0].group, copies)],
            layout=Layout(pp=2, vpp=2),
            options=ModelOptions("tiny-llama"),
        )


# Loss ---------------------------------------------------------------------------------------------


def test_kl_is_to_the_initial_weights(tmp_path: Path) -> None:
    def reference_is_fresh(trainer: Trainer) -> list[bool]:
        moved = compare.parameters(trainer.chunks)
        kept = compare.parameters(trainer._reference)
        return [not torch.equal(moved[name], kept[name]) for name in kept]

    job = settings(grpo=GrpoConfig(kl_coeff=0.2), compare=True)
    ((_, moved),) = train(tmp_path, 3, job, look=reference_is_fresh)
    assert all(moved)
    divergence = [row["train/kl"] for row in metrics_of(tmp_path)]
    assert divergence[0] == 0 and 0 < divergence[1] < divergence[2]


def test_a_strong_kl_holds_the_model_back(tmp_path: Path) -> None:
    found = []
    for coeff in (1e-6, 50.0):
        job = settings(grpo=GrpoConfig(kl_coeff=coeff), groups_per_step=1, warmup_steps=0, lr=3e-3)
        train(tmp_path / str(coeff), 6, job, bundled()[:1])
        found.append(metrics_of(tmp_path / str(coeff))[-1]["train/kl"])
    assert found[1] < 0.5 * found[0]


def test_old_logprobs_of_the_file_are_used(tmp_path: Path) -> None:
    """0.1 below the model's own, so that every ratio is exp(0.1), and more than clip_high cuts."""
    groups = bundled()[:1]
    _, fitted = fit_vocabulary(SMALL, groups)

    def own(trainer: Trainer) -> list[np.ndarray]:
        from megatron_prefix.rl import batches, passes

        items = [batches.microbatch(r, 0.0) for r in fitted[0].rollouts]
        found = passes.logprobs(trainer._passes[0], trainer.chunks, items)
        assert found is not None
        return found

    ((_, logprobs),) = train(
        tmp_path / "a", 1, settings(groups_per_step=1, lr=0.0), groups, look=own
    )
    given = tuple(
        replace(rollout, old_logprobs=values - 0.1)
        for rollout, values in zip(groups[0].rollouts, logprobs, strict=True)
    )
    job = settings(groups_per_step=1, grpo=GrpoConfig(clip_high=0.05))
    train(tmp_path / "b", 1, job, [Group(groups[0].name, given)])
    (row,) = metrics_of(tmp_path / "b")
    assert row["train/ratio"] == pytest.approx(np.exp(0.1), rel=1e-5)
    assert 0 < row["train/clip_frac"] < 1


def test_later_epochs_leave_the_old_policy(tmp_path: Path) -> None:
    job = settings(ppo_epochs=3, groups_per_step=1, warmup_steps=0, lr=1e-3)

    def ratios(trainer: Trainer) -> list[float]:
        return [update.means["approx_kl"] for update in trainer.step().updates]

    ((_, found),) = train(tmp_path, 1, job, look=ratios)
    assert found[0] == 0 < found[1] < found[2]


# What goes wrong ----------------------------------------------------------------------------------


def exploding() -> list[Group]:
    """Two groups, the second with old log-probs that no model has: the ratio is infinite."""
    good, bad = bundled()[:2]
    worse = tuple(
        replace(rollout, advantage=-1.0, old_logprobs=np.full(rollout.num_trained, -1e6))
        for rollout in bad.rollouts
    )
    return [good, Group(bad.name, worse)]


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, mode: str) -> None:
    job = settings(groups_per_step=1, mode=mode)
    ((first, before),) = train(tmp_path / "a", 1, job, exploding(), look=whole_state)
    ((summary, after),) = train(tmp_path / "b", 3, job, exploding(), look=whole_state)
    assert first.error is None
    assert summary.error is not None
    assert summary.error.startswith("step 2: loss inf, gradient norm ")
    assert "--max-skipped 0" in summary.error
    assert (summary.last_step, summary.skipped_updates) == (1, 1)
    assert_same(before, after)
    assert metrics_of(tmp_path / "b")[-1] == {"step": 2, "train/skipped_updates": 1}


def test_skipped_updates_are_counted_where_they_are_allowed(tmp_path: Path) -> None:
    job = settings(groups_per_step=1, max_skipped=1)
    ((summary, parameters),) = train(tmp_path, 4, job, exploding())
    assert summary.error is None and summary.last_step == 4 and summary.skipped_updates == 2
    rows = metrics_of(tmp_path)
    assert [row["train/skipped_updates"] for row in rows] == [0, 1, 1, 2]
    assert [row["train/loss"] is None for row in rows] == [False, True, False, True]
    assert all(torch.isfinite(value).all() for value in parameters.values())


# Metrics ------------------------------------------------------------------------------------------

SCHEMA = {
    "step": int,
    "train/loss": float,
    "train/ratio": float,
    "train/clip_frac": float,
    "train/approx_kl": float,
    "train/kl": float,
    "train/grad_norm": float,
    "train/grad_zeros": float,
    "train/reward_mean": float,
    "train/lr": float,
    "train/skipped_updates": int,
    "train/updates_s": float,
    "train/logprobs_s": float,
    "train/step_s": float,
    "train/raw_tokens_per_s": float,
    "train/executed_tokens_per_s": float,
    "prefix_sharing/raw_tokens": int,
    "prefix_sharing/executed_tokens": int,
}
OF_SHARING = {
    "prefix_sharing/active": int,
    "prefix_sharing/shared_ratio": float,
    "prefix_sharing/groups": int,
    "prefix_sharing/fallback_count": int,
    "prefix_sharing/predicted_speedup": float,
}
WHEN_SHARING = {
    "prefix_sharing/bubble_fraction": float,
    "prefix_sharing/kv_cache_gb": float,
    "prefix_sharing/out_of_memory_retried": int,
    "prefix_sharing/predicted_peak_gb": float,
}
FALLBACK = {"prefix_sharing/fallback_reason": str}


@pytest.mark.parametrize(
    ("prefix", "more", "active", "fallbacks"),
    [
        (PrefixConfig(mode="off"), {}, None, None),
        (PrefixConfig(mode="observe"), OF_SHARING, 0, 0),
        (PrefixConfig(mode="on"), OF_SHARING | WHEN_SHARING, 1, 0),
        (PrefixConfig(mode="auto"), OF_SHARING | WHEN_SHARING, 1, 0),
        (PrefixConfig(mode="auto", min_speedup=99.0), OF_SHARING | FALLBACK, 0, 2),
    ],
    ids=["off", "observe", "on", "auto", "auto, falling back"],
)
def test_metrics_of_every_mode(
    tmp_path: Path, prefix: PrefixConfig, more: dict[str, type], active: int, fallbacks: int
) -> None:
    train(tmp_path, 2, settings(prefix=prefix))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == SCHEMA | more
    row = rows[-1]
    assert row.get("prefix_sharing/active") == active
    assert row.get("prefix_sharing/fallback_count") == fallbacks
    raw, executed = row["prefix_sharing/raw_tokens"], row["prefix_sharing/executed_tokens"]
    assert (executed < raw) is (active == 1)
    if more:
        assert 0 < row["prefix_sharing/shared_ratio"] < 1
        assert row["prefix_sharing/predicted_speedup"] > 1
    if active:
        assert row["prefix_sharing/predicted_peak_gb"] > row["prefix_sharing/kv_cache_gb"] > 0
        assert row["prefix_sharing/bubble_fraction"] == 0
