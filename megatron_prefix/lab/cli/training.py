"""Arguments of the verb `train`, and the settings made of them."""

from __future__ import annotations

import argparse
from dataclasses import fields

from megatron_prefix.config import MODES
from megatron_prefix.lab.cli.arguments import (
    add_choice,
    add_config,
    add_deal,
    add_fields,
    add_switch,
    add_text,
    config_of,
)
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.rl.settings import GrpoConfig, RunOptions, TrainSettings

GROUPS_PER_STEP = 4
"""The default; more if ranks and minibatches need more, fewer if there are fewer groups."""
_STEPS = {
    "groups_per_step": f"groups in a step (default {GROUPS_PER_STEP})",
    "ppo_epochs": "passes over the rollouts of a step (default {})",
    "num_minibatches": "updates in a pass, each on whole groups (default {})",
    "lr": "learning rate (default {})",
    "warmup_steps": "first steps, in which the learning rate rises to --lr (default {})",
    "weight_decay": "weight decay of AdamW (default {})",
    "adam_eps": "epsilon of AdamW (default {})",
    "clip_grad": "clip the norm of all gradients at X; 0: do not clip (default 1; 0 in float64)",
}
_LOSS = {
    "clip_low": "clip the ratio of probabilities below at 1 - X (default {})",
    "clip_high": "clip the ratio of probabilities above at 1 + X (default {})",
    "kl_coeff": "weight of the KL divergence from the initial model (default {}: none)",
}
_UPDATES = {
    "max_skipped": "stop after more than N updates in a row whose loss or gradients are not finite"
    " (default {})",
    "loss_mean": "token: mean over trained tokens; rollout: mean of the rollouts' means"
    " (default {})",
}


def add_training(parser: argparse.ArgumentParser) -> None:
    """Steps, optimizer and loss."""
    group = parser.add_argument_group("training")
    text = "number of the last step (default: that of one pass over the rollouts)"
    add_fields(group, RunOptions, {"steps": text})
    add_fields(group, TrainSettings, _STEPS, clip_grad=None)
    add_fields(group, GrpoConfig, _LOSS)
    add_fields(group, TrainSettings, _UPDATES)
    add_switch(group, "--no-std", "do not divide advantages by the rewards' standard deviation")
    text = "use Megatron's distributed optimizer, whose state is sharded over data-parallel ranks"
    add_fields(group, TrainSettings, {"distributed_optimizer": text})


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """`--prefix-schedule`, `--cost-file`, `--deal` and `--compare`."""
    group = parser.add_argument_group("schedule")
    text = (
        "mode. off: the stock schedule; observe: the same, and metrics say what sharing would save;"
        " auto: share where it pays; on (default): share every step"
    )
    add_choice(group, "--prefix-schedule", text, MODES, "on")
    add_config(group, "cost_file")
    add_deal(group)
    text = "run Megatron's schedule on every update, too: time and compare both"
    add_fields(group, TrainSettings, {"compare": text})


def add_files(parser: argparse.ArgumentParser) -> None:
    """`--output --save-every --resume --plan-svg --trace`."""
    group = parser.add_argument_group("files")
    text = "folder of metrics and checkpoints (default: runs/train-DATE-TIME)"
    add_text(group, "--output", text, metavar="FOLDER")
    add_switch(group, "--overwrite", "replace the metrics of another run in that folder")
    add_fields(group, RunOptions, {"save_every": "steps between checkpoints; 0: none (default)"})
    text = (
        "resume from a run or a checkpoint; without FOLDER from --output, or from the beginning if"
        " there is no checkpoint yet"
    )
    add_text(group, "--resume", text, metavar="FOLDER", nargs="?", const="auto")
    text = (
        "send metrics to this project of Weights & Biases, too; WANDB_MODE=offline keeps them in"
        " the output folder"
    )
    add_text(group, "--wandb", text, metavar="PROJECT")
    add_text(group, "--plan-svg", "draw the last step's plan")
    text = (
        "write the measured timeline of the last update: a picture if FILE ends in .svg, else in"
        " Chrome's trace format (may be given again)"
    )
    add_text(group, "--trace", text, action="append", default=[])


def settings_of(args: argparse.Namespace, groups_per_step: int) -> TrainSettings:
    """The settings of a run.

    Raises:
        UserError: values that contradict.
    """
    # Options that have their fields' names, but for --baseline, which is a name of one.
    names = {field.name for field in fields(TrainSettings)} - {"baseline"}
    same = {name: value for name, value in vars(args).items() if name in names}
    default_clip = 0.0 if args.dtype == "float64" else 1.0
    return TrainSettings(
        **{
            **same,
            "groups_per_step": groups_per_step,
            "num_minibatches": args.minibatches,
            "clip_grad": default_clip if args.clip_grad is None else args.clip_grad,
            "divide_by_std": not args.no_std,
            "grpo": GrpoConfig(args.clip_low, args.clip_high, args.kl_coeff),
            "prefix": config_of(args),
            "baseline": Baseline("rollout", deal=args.deal),
        }
    )
