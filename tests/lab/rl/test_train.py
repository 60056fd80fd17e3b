"""Training runs: both schedules on the same updates, the loss, what goes wrong, and metrics."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.numerics import assert_close, compare
from megatron_prefix.lab.rl import snapshot
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.rl.job import ModelOptions, fit_vocabulary
from megatron_prefix.lab.rl.loss import GrpoConfig
from megatron_prefix.lab.runtime import Layout
from tests.harness import training
from tests.harness.training import bundled, metrics_of, settings, train


def test_both_schedules_agree_in_float64(tmp_path):
    """In two epochs, of which the second leaves the old policy."""
    job = settings(compare=True, ppo_epochs=2, clip_grad=0.0, lr=1e-3)
    options = replace(training.SMALL, dtype="float64")
    ((summary, _),) = train(tmp_path, 2, job, options=options)
    assert summary.passed is True and summary.grad_max_rel_diff < 1e-12
    assert summary.loss_max_abs_diff < 1e-12
    assert summary.executed_tokens < summary.raw_tokens and summary.stock_step_s > 0
    assert metrics_of(tmp_path)[0]["train/approx_kl"] > 1e-6


def test_comparing_changes_nothing(tmp_path):
    """The stock schedule's update is taken back without a trace."""
    plain = train(tmp_path / "a", 3, settings(), look=training.whole_state)
    beside = train(tmp_path / "b", 3, settings(compare=True), look=training.whole_state)
    training.assert_same(plain[0][1], beside[0][1])


def up_to_loss():
    """Rollouts that end with a trained token. Behind one an update runs nothing; so only of these
    a pass without gradients runs the same segments, and has the same bits."""
    groups = []
    for group in bundled():
        cut = (replace(one, tokens=one.tokens[: one.loss[-1][1]]) for one in group.rollouts)
        groups.append(replace(group, rollouts=tuple(cut)))
    return groups


def test_kl_is_to_the_initial_weights(tmp_path):
    def reference_is_fresh(trainer):
        moved = snapshot.parameters(trainer.chunks)
        kept = snapshot.parameters(trainer._reference)
        return [not torch.equal(moved[name], kept[name]) for name in kept]

    job = settings(grpo=GrpoConfig(kl_coeff=0.2), compare=True)
    ((_, moved),) = train(tmp_path, 3, job, up_to_loss(), look=reference_is_fresh)
    assert all(moved)
    divergence = [row["train/kl"] for row in metrics_of(tmp_path)]
    assert divergence[0] == 0 and 0 < divergence[1] < divergence[2]


def test_old_logprobs_of_the_file_are_used(tmp_path):
    """0.1 below the model's own, so that every ratio is exp(0.1), and more than clip_high cuts."""
    groups = bundled()[:1]
    _, fitted = fit_vocabulary(training.SMALL, groups)

    def own(trainer):
        from megatron_prefix.lab.rl import batches, passes

        items = [batches.microbatch(r, 0.0) for r in fitted[0].rollouts]
        found = passes.logprobs(trainer._passes[0], trainer.chunks, items)
        assert found is not None
        return found

    still = settings(groups_per_step=1, lr=0.0)
    ((_, logprobs),) = train(tmp_path / "a", 1, still, groups, look=own)
    given = tuple(
        replace(rollout, old_logprobs=values - 0.1)
        for rollout, values in zip(groups[0].rollouts, logprobs, strict=True)
    )
    job = settings(groups_per_step=1, grpo=GrpoConfig(clip_high=0.05))
    train(tmp_path / "b", 1, job, [Group(groups[0].name, given)])
    (row,) = metrics_of(tmp_path / "b")
    assert row["train/ratio"] == pytest.approx(np.exp(0.1), rel=1e-5)
    assert 0 < row["train/clip_frac"] < 1


def with_logprobs(logprob, **changes):
    """Two groups, the second with such old log-probs."""
    first, second = bundled()[:2]
    given = tuple(
        replace(rollout, old_logprobs=np.full(rollout.num_trained, logprob), **changes)
        for rollout in second.rollouts
    )
    return [first, Group(second.name, given)]


def exploding():
    """Of log-probs that no model has, whose ratio is infinite."""
    return with_logprobs(-1e6, advantage=-1.0)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    job = settings(groups_per_step=1)
    ((first, before),) = train(tmp_path / "a", 1, job, exploding(), look=training.whole_state)
    ((summary, after),) = train(tmp_path / "b", 3, job, exploding(), look=training.whole_state)
    assert first.error is None
    assert summary.error.startswith("step 2: loss inf, gradient norm ")
    assert "--max-skipped 0" in summary.error
    assert (summary.last_step, summary.skipped_updates) == (1, 1)
    training.assert_same(before, after)
    assert metrics_of(tmp_path / "b")[-1] == {"step": 2, "train/skipped_updates": 1}


def test_skipped_updates_are_counted_where_they_are_allowed(tmp_path):
    job = settings(groups_per_step=1, max_skipped=1)
    ((summary, parameters),) = train(tmp_path, 4, job, exploding())
    assert summary.error is None and summary.last_step == 4 and summary.skipped_updates == 2
    rows = metrics_of(tmp_path)
    assert [row["train/skipped_updates"] for row in rows] == [0, 1, 1, 2]
    assert [row["train/loss"] is None for row in rows] == [False, True, False, True]
    assert all(torch.isfinite(value).all() for value in parameters.values())


SCHEMA = {
    "step": int, "train/skipped_updates": int, "perf/total_num_tokens": int,
    **dict.fromkeys((f"prefix_sharing/{name}_tokens" for name in ("raw", "executed")), int),
    **dict.fromkeys(
        "train/loss train/ratio train/clip_frac train/approx_kl train/weighted_logprob train/kl"
        " train/grad_norm train/grad_zeros train/reward_mean train/lr train/updates_s train/step_s"
        " train/logprobs_s train/raw_tokens_per_s train/executed_tokens_per_s perf/throughput"
        " prefix_sharing/tflops timing_s/old_log_prob timing_s/ref timing_s/update_actor"
        " timing_s/step perf/time_per_step".split(), float,
    ),
}  # fmt: skip
PHASES = [f"prefix_sharing/{name}_s" for name in ("phase_a", "phase_b", "phase_c", "wait")]
OF_MODE = {"prefix_sharing/active": int, "prefix_sharing/fallback_count": int}
OF_SHARING = {
    **OF_MODE, "prefix_sharing/shared_ratio": float, "prefix_sharing/groups": int,
    "prefix_sharing/predicted_speedup": float,
}  # fmt: skip
WHEN_SHARING = {
    **dict.fromkeys(PHASES, float), "prefix_sharing/bubble_fraction": float,
    "prefix_sharing/kv_cache_gb": float, "prefix_sharing/out_of_memory_retried": int,
}  # fmt: skip
FALLBACK = {"prefix_sharing/fallback_reason": str}


@pytest.mark.parametrize(("prefix", "more", "active", "fallbacks"), [
    (PrefixConfig(mode="off"), {}, None, None),
    (PrefixConfig(mode="on", min_gain=0), OF_SHARING | WHEN_SHARING, 1, 0),
    (PrefixConfig(mode="auto", min_speedup=4.5, min_gain=0), OF_SHARING | FALLBACK, 0, 2),
], ids=["off", "on", "auto, falling back"])  # fmt: skip
def test_metrics_of_every_mode(tmp_path, prefix, more, active, fallbacks):
    train(tmp_path, 2, settings(prefix=prefix), up_to_loss())
    rows = [*map(json.loads, (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines())]
    assert len(rows) == 2
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == SCHEMA | more
        spent = [row[name] for name in PHASES if name in row]
        assert sum(spent) <= row["train/updates_s"] == row["timing_s/update_actor"]
        assert all(spent[:3]), "every phase ran"
        passes = row["timing_s/old_log_prob"], row["timing_s/ref"]
        assert min(passes) > 0 and sum(passes) <= row["train/logprobs_s"]
    row = rows[-1]
    assert row.get("prefix_sharing/active") == active
    assert row.get("prefix_sharing/fallback_count") == fallbacks
    raw, executed = row["prefix_sharing/raw_tokens"], row["prefix_sharing/executed_tokens"]
    assert (executed < raw) is (active == 1)
    if "prefix_sharing/shared_ratio" in more:
        assert 0 < row["prefix_sharing/shared_ratio"] < 1
        assert row["prefix_sharing/predicted_speedup"] > 1
    if active:
        assert row["prefix_sharing/kv_cache_gb"] > 0
        assert row["prefix_sharing/bubble_fraction"] == 0


def on_one_rank_and_two(folder, job, groups):
    """A step on one rank and on two, with the same gradients: every rank's summary."""

    def gradients(trainer):
        return snapshot.gradients(trainer.chunks)

    ((one, expected),), two = (
        train(folder / f"dp{dp}", 1, job, groups, layout=Layout(dp=dp), look=gradients)
        for dp in (1, 2)
    )
    for _, gradients in two:
        for name, wanted in expected.items():
            assert_close(gradients[name], wanted, one.raw_tokens, what=name)
    return one, [summary for summary, _ in two]


def test_data_parallel_ranks_make_the_same_update(tmp_path):
    """Groups of different sizes: ranks have different numbers of rollouts and of tokens."""
    groups = bundled()[:2]
    assert len({len(group.rollouts) for group in groups}) == 2
    job = settings(loss_mean="rollout", clip_grad=0.0)
    on_one_rank_and_two(tmp_path, job, groups)
    rows = [metrics_of(tmp_path / f"dp{dp}")[0] for dp in (1, 2)]
    for name in ("prefix_sharing/raw_tokens", "prefix_sharing/executed_tokens"):
        assert rows[0][name] == rows[1][name]
    for name in ("train/loss", "train/kl", "train/ratio"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-5)


def test_metrics_say_what_crossed_ranks(tmp_path):
    """Every payload that one rank gets the other sends, and its gradients come back."""
    groups = bundled()[:2]
    job = settings(clip_grad=0.0, baseline=Baseline("rollout", deal="length"))
    job = replace(job, prefix=replace(job.prefix, across_ranks="on"))
    on_one_rank_and_two(tmp_path, job, groups)
    row = metrics_of(tmp_path / "dp2")[0]
    received, sent = row["prefix_sharing/received_tokens"], row["prefix_sharing/sent_tokens"]
    rows = 2 * 2 * 2 * 16 * 4  # of K and V, of two layers and heads, in fp32, as gradients are
    assert received + sent > 0
    # A payload one way, gradients the other; of some positions final hidden states, too.
    sizes = [row[f"prefix_sharing/{name}"] * 2**30 for name in ("received_gb", "sent_gb")]
    assert sizes[0] == pytest.approx(sizes[1])
    assert 1.0 <= sizes[0] / ((received + sent) * rows) < 1.0 + 64 * 4 / rows
    timed = json.loads((tmp_path / "dp2" / "metrics.jsonl").read_text(encoding="utf-8"))
    assert 0 < timed["prefix_sharing/exchange_wait_s"] < timed["train/updates_s"]
    assert "prefix_sharing/sent_tokens" not in metrics_of(tmp_path / "dp1")[0]


MOE = ModelOptions("tiny-moe", overrides=(("num_layers", 2),))


def test_ranks_with_different_numbers_of_rollouts_share_experts(tmp_path):
    """Three steps, whose updates are in the losses of the next."""
    found = []
    for name, layout in (("dp", Layout(dp=2)), ("ep", Layout(dp=2, ep=2))):
        train(tmp_path / name, 3, settings(), layout=layout, options=MOE)
        found.append(metrics_of(tmp_path / name))
    assert len({len(group.rollouts) for group in bundled()}) > 1
    for ours, theirs in zip(*found, strict=True):
        for metric in ("train/loss", "train/kl", "train/ratio", "train/grad_norm"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-5, abs=1e-5), metric


def test_a_difference_on_any_rank_is_heard_by_all(tmp_path, monkeypatch):
    judge, rank = compare.compare, 1

    def wrong_on_one(*traces):
        verdict = judge(*traces)
        mine = dist.get_rank() == rank
        return replace(verdict, passed=False, failures=("seen",)) if mine else verdict

    monkeypatch.setattr(compare, "compare", wrong_on_one)
    job = settings(compare=True, groups_per_step=2)
    for summary, _ in train(tmp_path, 1, job, bundled()[:2], layout=Layout(dp=2)):
        assert summary.passed is False
        assert summary.failures == [f"step 1, update 1: rank {rank}: seen"]


def test_context_parallel_ranks_train_as_one(tmp_path):
    """Two steps, compared with the stock schedule; old log-probs are the model's and given ones."""
    groups, job = with_logprobs(-3.0), settings(compare=True)
    for cp in (1, 2):
        for summary, _ in train(tmp_path / f"cp{cp}", 2, job, groups, layout=Layout(cp=cp)):
            assert summary.passed is True
    rows = [metrics_of(tmp_path / f"cp{cp}")[-1] for cp in (1, 2)]
    for name in ("train/loss", "train/kl", "train/ratio", "train/grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-4), name
    for name in ("prefix_sharing/raw_tokens", "prefix_sharing/executed_tokens"):
        padding = rows[1][name] - rows[0][name]
        assert 0 <= padding < 4 * sum(len(group.rollouts) for group in groups), name


@pytest.mark.parametrize(("loss_mean", "case"), [("token", "cut"), ("rollout", "idle")])
def test_a_cut_group_and_an_idle_rank_change_no_update(tmp_path, loss_mean, case):
    """One group on two ranks: a part each, or all on one where cutting it would gain nothing."""
    (group, *_) = bundled()
    rollouts = group.rollouts if case == "cut" else (group.rollouts[0],)
    groups = [Group(group.name, tuple(replace(r, reward=float(i)) for i, r in enumerate(rollouts)))]
    if case == "idle":  # alone in its group it would have no advantage
        groups[0] = Group(group.name, (replace(rollouts[0], advantage=1.5),))
    job = settings(loss_mean=loss_mean, clip_grad=0.0, groups_per_step=1)
    alone, two = on_one_rank_and_two(tmp_path, job, groups)
    for summary in two:
        more = summary.executed_tokens - alone.executed_tokens
        assert (more > 10) == (case == "cut"), "both parts compute the prompt"
    rows = [metrics_of(tmp_path / f"dp{dp}")[0] for dp in (1, 2)]
    for name in ("train/loss", "train/reward_mean", "train/grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-4, abs=1e-5)
