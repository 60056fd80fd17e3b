"""Arguments of the verb `train`, and the settings made of them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from megatron_prefix.config import MODES
from megatron_prefix.lab.cli.arguments import add_config, config_of, real, whole

GROUPS_PER_STEP = 4
"""The default; more if ranks and minibatches need more, fewer if there are fewer groups."""


def add_training(parser: argparse.ArgumentParser) -> None:
    """Steps, optimizer and loss."""
    group, number = parser.add_argument_group("training"), real()
    for option, kind, default, text in (
        ("--steps", whole(), None, "step to end with (default: once over the rollouts)"),
        ("--groups-per-step", whole(), None, f"groups of a step (default {GROUPS_PER_STEP})"),
        ("--ppo-epochs", whole(), 1, "passes of a step over its rollouts (default 1)"),
        ("--minibatches", whole(), 1, "updates of a pass, each of whole groups (default 1)"),
        ("--lr", number, 1e-6, "learning rate (default 1e-6)"),
        ("--warmup-steps", whole(0), 0, "steps in which the learning rate rises (default 0)"),
        ("--weight-decay", number, 0.1, "AdamW's (default 0.1)"),
        ("--adam-eps", number, 1e-8, "AdamW's epsilon (default 1e-8)"),
        ("--clip-grad", number, None, "largest gradient norm; 0: any (default 1; 0 in float64)"),
        ("--clip-low", number, 0.2, "ratios count no lower than 1 - X (default 0.2)"),
        ("--clip-high", number, 0.28, "ratios count no higher than 1 + X (default 0.28)"),
        ("--kl-coeff", number, 0.0, "weight of the KL to the initial model (default 0: none)"),
        ("--max-skipped", whole(0), 0, "updates in a row that may not be finite (default 0)"),
    ):
        name = "X" if kind is number else "N"
        group.add_argument(option, type=kind, default=default, metavar=name, help=text)
    group.add_argument(
        "--loss-mean",
        choices=("token", "rollout"),
        default="token",
        help="mean over trained tokens, or over rollouts of their means (default token)",
    )
    group.add_argument(
        "--no-std", action="store_true", help="do not divide advantages by the rewards' deviation"
    )
    group.add_argument(
        "--distributed-optimizer",
        action="store_true",
        help="Megatron's, which shards its state over data-parallel ranks",
    )


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """`--prefix-schedule`, `--cost-file` and `--compare`."""
    group = parser.add_argument_group("schedule")
    group.add_argument(
        "--prefix-schedule",
        choices=MODES,
        default="on",
        help="off: Megatron's; observe: Megatron's, and metrics say what sharing would give; auto:"
        " share where it pays; on: always (default)",
    )
    add_config(group, "cost_file")
    group.add_argument(
        "--compare", action="store_true", help="run Megatron's schedule too, time and compare both"
    )


def add_files(parser: argparse.ArgumentParser) -> None:
    """`--output --save-every --resume --plan-svg --trace`."""
    group = parser.add_argument_group("files")
    group.add_argument(
        "--output",
        metavar="DIR",
        help="folder of metrics and checkpoints (default: runs/train-DATE-TIME)",
    )
    group.add_argument(
        "--save-every",
        type=whole(0),
        default=0,
        metavar="N",
        help="steps between checkpoints; 0: none (default)",
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="DIR",
        help="go on from a run's folder or a checkpoint; without DIR from OUTPUT, where it has one",
    )
    group.add_argument(
        "--wandb",
        metavar="PROJECT",
        help="metrics to this project of Weights & Biases, too; WANDB_MODE=offline keeps them in"
        " OUTPUT",
    )
    group.add_argument("--plan-svg", metavar="FILE", help="draw the last step's plan")
    group.add_argument(
        "--trace",
        metavar="FILE",
        action="append",
        default=[],
        help="write the measured timeline of the last update: a picture where FILE ends in .svg,"
        " else in Chrome's trace format (may be given again)",
    )


def settings_of(args: argparse.Namespace, groups_per_step: int) -> Any:
    """The `TrainSettings` of a run; imports torch.

    Raises:
        UserError: values that contradict.
    """
    from megatron_prefix.lab.rl.loss import GrpoConfig
    from megatron_prefix.lab.rl.settings import TrainSettings

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
        }
    )
