"""What a user can set of a training run."""

import math

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.rl.settings import TrainSettings


def test_learning_rate_rises_and_stays():
    settings = TrainSettings(groups_per_step=1, lr=0.8, warmup_steps=4)
    assert [settings.lr_at(step) for step in (1, 2, 4, 5, 100)] == [0.2, 0.4, 0.8, 0.8, 0.8]
    assert TrainSettings(groups_per_step=1, lr=0.8).lr_at(1) == 0.8


@pytest.mark.parametrize(
    "fields",
    [
        {"groups_per_step": 0}, {"ppo_epochs": 0}, {"num_minibatches": 0}, {"warmup_steps": -1},
        {"max_skipped": -1}, {"lr": -1e-6}, {"lr": math.nan}, {"clip_grad": math.inf},
        {"weight_decay": -0.1}, {"loss_mean": "sample"},
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings_are_refused(fields):
    with pytest.raises(UserError, match=f"^{next(iter(fields))} is "):
        TrainSettings(**{"groups_per_step": 1, **fields})


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_comparing_stock_with_itself_is_refused(mode):
    with pytest.raises(UserError, match=f"mode {mode}"):
        TrainSettings(groups_per_step=1, compare=True, prefix=PrefixConfig(mode=mode))
