"""Training runs on several ranks make the same updates as on one."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.numerics import assert_close, compare
from megatron_prefix.lab.rl import snapshot
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.runtime import Layout
from tests.harness.training import bundled, metrics_of, settings, train


def on_one_rank_and_two(folder, job, groups):
    """A step on one rank and on two: every rank's summary and gradients."""
    return [
        train(
            folder / f"dp{dp}", 1, job, groups, layout=Layout(dp=dp),
            look=lambda trainer: snapshot.gradients(trainer.chunks),
        )
        for dp in (1, 2)
    ]  # fmt: skip


def test_data_parallel_ranks_make_the_same_update(tmp_path):
    """Groups of different sizes: ranks have different numbers of rollouts and of tokens."""
    groups = bundled()[:2]
    assert len({len(group.rollouts) for group in groups}) == 2
    job = settings(loss_mean="rollout", clip_grad=0.0)
    found = on_one_rank_and_two(tmp_path, job, groups)
    num_tokens = found[0][0][0].raw_tokens
    for _, gradients in found[1]:
        for name, wanted in found[0][0][1].items():
            assert_close(gradients[name], wanted, num_tokens, what=name)
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
    ((alone, wanted),), two = on_one_rank_and_two(tmp_path, job, groups)
    for _, gradients in two:
        for name, value in wanted.items():
            assert_close(gradients[name], value, alone.raw_tokens, what=name)
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


@pytest.mark.parametrize(("loss_mean", "case"), [("token", "cut"), ("rollout", "idle")])
def test_a_cut_group_and_an_idle_rank_change_no_update(tmp_path, loss_mean, case):
    """One group on two ranks: a part each, or all on one where cutting it would gain nothing."""
    (group, *_) = bundled()
    rollouts = group.rollouts if case == "cut" else (group.rollouts[0],)
    groups = [Group(group.name, tuple(replace(r, reward=float(i)) for i, r in enumerate(rollouts)))]
    if case == "idle":  # alone in its group it would have no advantage
        groups[0] = Group(group.name, (replace(rollouts[0], advantage=1.5),))
    job = settings(loss_mean=loss_mean, clip_grad=0.0, groups_per_step=1)
    found = on_one_rank_and_two(tmp_path, job, groups)
    ((alone, gradients),) = found[0]
    for summary, others in found[1]:
        more = summary.executed_tokens - alone.executed_tokens
        assert (more > 10) == (case == "cut"), "both parts compute the prompt"
        for name, wanted in gradients.items():
            assert_close(others[name], wanted, alone.raw_tokens, what=name)
    rows = [metrics_of(tmp_path / f"dp{dp}")[0] for dp in (1, 2)]
    for name in ("train/loss", "train/reward_mean", "train/grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-4, abs=1e-5)
