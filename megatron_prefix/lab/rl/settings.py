"""What a user can set of a training run, checked once. [pure]"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.rl.baseline import Baseline

LOSS_MEANS = ("token", "rollout")
ROUTES = ("own", "recorded", "given")
LEAST = {
    "groups_per_step": 1,
    "ppo_epochs": 1,
    "num_minibatches": 1,
    "warmup_steps": 0,
    "max_skipped": 0,
}
"""Smallest values of fields of TrainSettings that are integers."""

ADAM_EPS = 1e-8
"""Megatron's default."""


@dataclass(frozen=True)
class GrpoConfig:
    """The loss of a trained token: clipped surrogate plus kl_coeff times KL.

    How tokens are averaged is Megatron's `calculate_per_token_loss`: True takes the mean over all
    trained tokens of the step, False the mean over microbatches of each one's token mean. That is
    the mean over rollouts if a microbatch is a rollout; in a pack of several (packing.py) every
    trained token counts alike.

    Attributes:
        clip_low: the ratio of probabilities is clipped below 1 - clip_low.
        clip_high: the ratio of probabilities is clipped above 1 + clip_high.
        kl_coeff: weight of the KL divergence from the reference model; 0 needs no reference.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coeff: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise UserError(f"clip_low is {self.clip_low}: give a number above 0, at most 1")
        if not 0 < self.clip_high < math.inf:
            raise UserError(f"clip_high is {self.clip_high}: give a number above 0")
        if not 0 <= self.kl_coeff < math.inf:
            raise UserError(f"kl_coeff is {self.kl_coeff}: give 0 (no reference) or more")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of GRPO actor updates.

    Attributes:
        groups_per_step: groups of one step, over all data-parallel ranks.
        ppo_epochs: passes of a step over its rollouts.
        num_minibatches: optimizer updates of a pass, each of whole groups.
        lr: learning rate, constant after the warm-up.
        warmup_steps: steps in which the learning rate rises linearly, from lr / warmup_steps.
        weight_decay: AdamW's, on matrices.
        adam_eps: if a gradient is below it, AdamW's step shrinks with the gradient.
        clip_grad: largest norm of the gradient; 0 does not clip.
        loss_mean: "token": mean over all trained tokens of an update ("DAPO", section 3.3);
            "rollout": mean over rollouts of each one's token mean ("DeepSeekMath", equation 3).
        divide_by_std: see batches.advantages.
        grpo: the loss of a token.
        prefix: the schedule.
        baseline: how rollouts go to ranks, and the microbatches: one rollout each, or packs, which
            `loss_mean` "rollout" is not for.
        compare: run the stock schedule too, on the same weights and update, and compare.
        max_skipped: updates in a row that may be skipped because loss or gradient is not finite.
        distributed_optimizer: Megatron's, which shards its state over data-parallel ranks.
        routes: experts of a token, in all passes of a step: "own": routers choose in each;
            "recorded": what they choose in a pass before the step; "given": `Trainer.routes`.
        looks_first: whether mode "auto" runs the first update with Megatron's schedule, as in a
            trainer: so it sees the memory that the others may take.
    """

    groups_per_step: int
    ppo_epochs: int = 1
    num_minibatches: int = 1
    lr: float = 1e-6
    warmup_steps: int = 0
    weight_decay: float = 0.1
    adam_eps: float = ADAM_EPS
    clip_grad: float = 1.0
    loss_mean: str = "token"
    divide_by_std: bool = True
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    baseline: Baseline = field(default_factory=lambda: Baseline("rollout"))
    compare: bool = False
    max_skipped: int = 0
    distributed_optimizer: bool = False
    routes: str = "own"
    looks_first: bool = False

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}: give a number from {least}")
        for name in ("lr", "weight_decay", "adam_eps", "clip_grad"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}: give a finite number from 0")
        if self.loss_mean not in LOSS_MEANS:
            raise UserError(f"loss_mean is {self.loss_mean!r}: give {' or '.join(LOSS_MEANS)}")
        if self.routes not in ROUTES:
            raise UserError(f"routes is {self.routes!r}: give one of {', '.join(ROUTES)}")
        if self.baseline.packed and self.loss_mean != "token":
            raise UserError(
                f"--baseline packed with --loss-mean {self.loss_mean}: Megatron-Core takes the mean"
                " of each pack, which is not that of its rollouts; use --loss-mean token"
            )
        if self.compare and self.prefix.mode in ("off", "observe"):
            raise UserError(
                f"compare with the prefix schedule in mode {self.prefix.mode}: give auto or on"
            )

    @property
    def log_names(self) -> list[str]:
        """Names of the loss's logs."""
        names = ["loss", "ratio", "clip_frac", "approx_kl", "weighted_logprob"]
        return [*names, "kl"] if self.grpo.kl_coeff else names

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        return self.lr * min(1.0, step / self.warmup_steps) if self.warmup_steps else self.lr


@dataclass(frozen=True)
class RunOptions:
    """What a run does besides training.

    Attributes:
        steps: the step to end with, counted from the very first run.
        output: folder of metrics and checkpoints.
        save_every: steps between checkpoints; the last step is saved too. 0: no checkpoints.
        resume: run folder or checkpoint to go on from; "auto": `output`, if it has one.
        wandb_project: see MetricsWriter.
        overwrite: whether to replace the metrics of another run in `output`.
    """

    steps: int
    output: Path
    save_every: int = 0
    resume: str | None = None
    wandb_project: str | None = None
    overwrite: bool = False
