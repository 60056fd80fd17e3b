"""The GRPO loss against its formula, written out token by token."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Rollout
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.rl.batches import microbatch, trained_logprobs
from megatron_prefix.lab.rl.loss import GrpoConfig, forward_step, logprob_step


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


@pytest.mark.parametrize(("advantage", "kl_coeff"), [(1.5, 0.0), (-0.7, 0.1), (0.0, 0.1)])
def test_loss_is_the_formula(advantage, kl_coeff):
    config = GrpoConfig(clip_low=0.2, clip_high=0.3, kl_coeff=kl_coeff)
    rollout, new, old, ref = a_case()
    model = Table(new)
    item = microbatch(rollout, advantage, old_logprobs=old, ref_logprobs=ref)
    output, loss_func = forward_step(config)(iter([item]), model)
    loss, num_tokens, logs = loss_func(output)
    loss.backward()

    trained = rollout.loss_mask[1:]
    want, clipped, gradients = expected(config, new[trained], old, ref, advantage)
    length = rollout.num_trained
    wanted_grad = torch.zeros(len(new), dtype=torch.float64)
    wanted_grad[torch.from_numpy(trained)] = torch.tensor(gradients, dtype=torch.float64)
    assert_close(loss.detach(), torch.tensor(want, dtype=torch.float64), length)
    assert_close(model.logprobs.grad, wanted_grad, length)
    assert num_tokens.dtype == torch.int32 and int(num_tokens) == length
    assert logs["clip_frac"].tolist() == [clipped, length]
    assert advantage == 0 or 0 < clipped < length
    assert ("kl" in logs) == (kl_coeff > 0)
    for sums in logs.values():
        assert sums.shape == (2,) and not sums.requires_grad and int(sums[1]) == length


def test_without_old_logprobs_the_ratio_is_one():
    rollout, new, _, _ = a_case()
    model = Table(new)
    output, loss_func = forward_step(GrpoConfig())(iter([microbatch(rollout, 2.0)]), model)
    loss, _, logs = loss_func(output)
    loss.backward()
    assert logs["ratio"].tolist() == [rollout.num_trained] * 2
    assert logs["approx_kl"].tolist() == [0.0, rollout.num_trained]
    trained = torch.from_numpy(rollout.loss_mask[1:])
    assert torch.equal(model.logprobs.grad, torch.where(trained, -2.0, 0.0).double())


def test_untrained_positions_never_overflow():
    rollout, new, old, ref = a_case()
    new = np.where(rollout.loss_mask[1:], new, -2000.0)
    item = microbatch(rollout, 1.0, old_logprobs=old, ref_logprobs=ref)
    model = Table(new)
    output, loss_func = forward_step(GrpoConfig(kl_coeff=0.1))(iter([item]), model)
    loss, _, _ = loss_func(output)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(model.logprobs.grad).all()


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


@pytest.mark.parametrize(
    "fields",
    [
        {"clip_low": 0.0}, {"clip_low": 1.5}, {"clip_high": -1.0}, {"clip_high": math.inf},
        {"kl_coeff": -0.1}, {"kl_coeff": math.nan},
    ],
)  # fmt: skip
def test_bad_settings_are_refused(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        GrpoConfig(**fields)
