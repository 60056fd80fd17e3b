"""The GRPO loss against its formula, written out token by token."""

import json
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from megatron_prefix.lab.data.rollouts import Rollout
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.rl import flops, metrics
from megatron_prefix.lab.rl.batches import microbatch, trained_logprobs
from megatron_prefix.lab.rl.loss import GrpoConfig, forward_step, logprob_step
from megatron_prefix.lab.rl.metrics import MetricsWriter
from megatron_prefix.lab.rl.run_folder import METRICS


class Table(nn.Module):
    """Answers with the negative of one log-prob a position, as a model answers with labels."""

    def __init__(self, logprobs):
        super().__init__()
        self.logprobs = nn.Parameter(torch.tensor(logprobs, dtype=torch.float64))

    def forward(self, tokens, positions, attention_mask, labels=None, loss_mask=None):
        return -self.logprobs[positions[0]].unsqueeze(0)


def a_rollout(num_tokens=12, **fields):
    tokens = np.arange(3, 3 + num_tokens, dtype=np.int32)
    return Rollout("g", "0", tokens, 4, ((4, 7), (9, 12)), 1.0, **fields)


def a_case(seed=3):
    """New, old and reference log-probs far enough apart that some tokens are clipped."""
    rng = np.random.default_rng(seed)
    rollout = a_rollout()
    new = -rng.uniform(0.1, 3.0, len(rollout) - 1)
    trained = new[rollout.loss_mask[1:]]
    old = trained + rng.normal(0, 0.5, trained.shape)
    ref = trained + rng.normal(0, 0.5, trained.shape)
    return rollout, new, old, ref


def expected(config, new, old, ref, advantage):
    """Loss, clipped tokens, and d loss / d new of every trained token, by the formula."""
    losses, clipped, gradients = [], 0, []
    for n, o, r in zip(new, old, ref, strict=True):
        ratio = math.exp(n - o)
        held = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        cut = held * advantage < ratio * advantage
        kl = math.exp(r - n) - (r - n) - 1
        losses.append(-min(ratio * advantage, held * advantage) + config.kl_coeff * kl)
        gradients.append(
            -(0 if cut else ratio * advantage) + config.kl_coeff * (1 - math.exp(r - n))
        )
        clipped += cut
    return sum(losses), clipped, gradients


def stepped(config, item, logprobs):
    """Loss, number of tokens, logs, and the gradient of a model's log-probs."""
    model = Table(logprobs)
    output, loss_func = forward_step(config)(iter([item]), model)
    loss, num_tokens, logs = loss_func(output)
    loss.backward()
    return loss.detach(), num_tokens, logs, model.logprobs.grad


@pytest.mark.parametrize(("advantage", "kl_coeff"), [(1.5, 0.0), (-0.7, 0.1), (0.0, 0.1)])
def test_loss_is_the_formula(advantage, kl_coeff):
    config = GrpoConfig(clip_low=0.2, clip_high=0.3, kl_coeff=kl_coeff)
    rollout, new, old, ref = a_case()
    item = microbatch(rollout, advantage, old_logprobs=old, ref_logprobs=ref)
    loss, num_tokens, logs, grad = stepped(config, item, new)
    trained = rollout.loss_mask[1:]
    want, clipped, gradients = expected(config, new[trained], old, ref, advantage)
    length = rollout.num_trained
    wanted_grad = torch.zeros(len(new), dtype=torch.float64)
    wanted_grad[torch.from_numpy(trained)] = torch.tensor(gradients, dtype=torch.float64)
    assert_close(loss, torch.tensor(want, dtype=torch.float64), length)
    assert_close(grad, wanted_grad, length)
    assert num_tokens.dtype == torch.int32 and int(num_tokens) == length
    assert logs["clip_frac"].tolist() == [clipped, length]
    assert advantage == 0 or 0 < clipped < length
    assert ("kl" in logs) == (kl_coeff > 0)
    for sums in logs.values():
        assert sums.shape == (2,) and not sums.requires_grad and int(sums[1]) == length


def test_without_old_logprobs_the_ratio_is_one():
    rollout, new, _, _ = a_case()
    _, _, logs, grad = stepped(GrpoConfig(), microbatch(rollout, 2.0), new)
    assert logs["ratio"].tolist() == [rollout.num_trained] * 2
    assert logs["approx_kl"].tolist() == [0.0, rollout.num_trained]
    trained = torch.from_numpy(rollout.loss_mask[1:])
    assert torch.equal(grad, torch.where(trained, -2.0, 0.0).double())


def test_untrained_positions_never_overflow():
    rollout, new, old, ref = a_case()
    new = np.where(rollout.loss_mask[1:], new, -2000.0)
    item = microbatch(rollout, 1.0, old_logprobs=old, ref_logprobs=ref)
    loss, _, _, grad = stepped(GrpoConfig(kl_coeff=0.1), item, new)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


@pytest.mark.parametrize("multiple", [1, 4])
def test_logprob_pass_finds_the_trained_tokens(multiple):
    rollout, new, _, _ = a_case()
    item = microbatch(rollout, 0.0, multiple=multiple)
    padded = np.pad(new, (0, item["tokens"].shape[1] - len(new)))
    output, loss_func = logprob_step()(iter([item]), Table(padded))
    loss, num_tokens, logs = loss_func(output)
    assert loss.item() == 0 and int(num_tokens) == 1
    found = trained_logprobs(item, logs["logprobs"])
    assert found.tolist() == new[rollout.loss_mask[1:]].tolist()


# The metrics file and its counterpart in TensorBoard ----------------------------------------------


def lines(folder):
    return [json.loads(line) for line in (folder / METRICS).read_text("utf-8").splitlines()]


def write(folder, steps, first=1, value=0.5):
    writer = MetricsWriter(folder, first)
    try:
        for step in steps:
            writer.write(step, {"train/loss": value + step, "prefix_sharing/active": 1})
    finally:
        writer.close()


@pytest.mark.parametrize(("name", "rate"), [
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA H100 PCIe", None), ("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GeForce RTX 4090", None),
])  # fmt: skip
def test_the_rate_of_a_gpu_is_that_of_its_card(name, rate, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert flops.peak_flops("bfloat16") == rate
    assert flops.peak_flops("float32") is None


def test_resuming_drops_what_comes_again_and_a_cut_line(tmp_path):
    write(tmp_path, range(1, 5))
    with open(tmp_path / METRICS, "a", encoding="utf-8") as file:
        file.write('{"step": 5, "train/lo')
    write(tmp_path, range(3, 5), first=3, value=0.25)
    assert [(row["step"], row["train/loss"]) for row in lines(tmp_path)] == [
        (1, 1.5), (2, 2.5), (3, 3.25), (4, 4.25),
    ]  # fmt: skip


def test_tensorboard_has_the_same_names(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(1, 4))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "prefix_sharing/active"}
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 1.5), (2, 2.5), (3, 3.5),
    ]  # fmt: skip


def test_weights_and_biases_gets_the_same_rows(tmp_path, monkeypatch):
    """From a module of that name, as far as it is used."""
    told, wandb = [], ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.init = lambda **options: (
        told.append(options)
        or SimpleNamespace(
            log=lambda row, step: told.append({"step": step, **row}),
            finish=lambda exit_code: told.append(exit_code),
        )
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    writer = MetricsWriter(tmp_path / "run", wandb_project="mine")
    writer.begin()
    row = {"train/loss": 0.5, "prefix_sharing/fallback_reason": "short"}
    writer.write(3, row)
    writer.close()
    options = {"project": "mine", "name": "run", "dir": str(tmp_path / "run")}
    assert told == [options, {"step": 3, **row}, 0]


def test_times_and_rates_under_verls_names():
    found = {"train/step_s": 4.0, "train/updates_s": 3.0, "prefix_sharing/raw_tokens": 4000}
    assert metrics.under_verls_names(found, {"ref_logprobs": 0.5}, 2) == {
        "timing_s/ref": 0.5,
        "timing_s/update_actor": 3.0,
        "timing_s/step": 4.0,
        "perf/total_num_tokens": 4000,
        "perf/time_per_step": 4.0,
        "perf/throughput": 500.0,  # a second and rank
    }


def test_flops_of_packs_are_those_of_their_rollouts():
    cost = flops.cost_model(resolve("tiny-llama").with_vocab(100))
    rows = [{"tokens": torch.zeros(1, n)} for n in (5, 7)]
    pack = {"tokens": torch.zeros(1, 12), "cu_seqlens": torch.tensor([0, 5, 12])}
    assert flops.of_microbatches(cost, rows, 1) == flops.of_microbatches(cost, [pack], 1)
    positions, pairs = 12, 15 + 28
    linear, head, attention, *_ = cost.forward
    by_hand = (linear + head) * positions + attention * pairs
    assert flops.of_microbatches(cost, rows, 1) == pytest.approx(3 * by_hand)
    slices = [{"tokens": torch.zeros(1, 6)}]
    whole = [{"tokens": torch.zeros(1, 12)}]
    assert flops.of_microbatches(cost, slices, 2) == flops.of_microbatches(cost, whole, 1)
