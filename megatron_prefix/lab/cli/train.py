"""`train`: GRPO actor updates over rollouts that exist already."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli import arguments
from megatron_prefix.lab.cli.modelling import Job, add_model, job_of
from megatron_prefix.lab.cli.outputs import check_outputs
from megatron_prefix.lab.cli.progress import LINE_EVERY, steps_shown
from megatron_prefix.lab.cli.report import differences, facts, number, print_facts, print_json
from megatron_prefix.lab.cli.training import (
    GROUPS_PER_STEP,
    add_files,
    add_schedule,
    add_training,
    settings_of,
)
from megatron_prefix.lab.rl.settings import RunOptions, TrainSettings
from megatron_prefix.lab.runtime.folders import check_folder_writable

if TYPE_CHECKING:
    from megatron_prefix.lab.rl.run import Summary
    from megatron_prefix.lab.rl.trainer import CompletedStep

HELP = """\
Trains a model on a rollout file by GRPO: advantages from each group's rewards, old log-probs by a
pass without gradients if the file has none, a clipped loss, AdamW through Megatron's optimizer.
Metrics go to OUTPUT/metrics.jsonl and, if it is installed, TensorBoard. --compare runs
Megatron-Core's stock schedule on every update too, from the same weights, and compares; the exit
code is then 1 if they differ by more than the numerics policy allows. --progress writes a line a
step to stderr."""
EPILOG = """\
examples:
  megatron-prefix train rollouts.jsonl.gz --steps 10 --lr 1e-3 --output runs/tiny
  megatron-prefix train rollouts.jsonl.gz --compare --plan-svg plan.svg
  megatron-prefix train rollouts.jsonl.gz --dp 2 --deal length --compare
  megatron-prefix train rollouts.jsonl.gz --steps 20 --save-every 5 --output runs/tiny --resume
  torchrun --nproc-per-node 8 -m megatron_prefix train rollouts.jsonl.gz --device cuda \\
      --load-hf Qwen3-8B --dtype bfloat16 --tp 4 --sequence-parallel --recompute full
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    several = "steps take groups of several one file after another"
    arguments.add_rollouts(parser, positional=True, several=several)
    add_training(parser)
    add_schedule(parser)
    add_files(parser)
    add_model(parser, model="tiny-llama", dtype="float32")
    arguments.add_layout(parser)
    arguments.add_lengths(parser)
    arguments.add_config(parser.add_argument_group("plan"), "plan_file")
    arguments.add_messages(parser)


@dataclass(frozen=True)
class Training:
    """What the ranks of a job train.

    Attributes:
        job: model, layout and rollouts.
        settings: of the updates.
        run: steps, folders and checkpoints.
        plan_svg, traces: files of the last update; see timelines.py.
        line_every_s: of progress if stderr is not a terminal; see `steps_shown`.
    """

    job: Job
    settings: TrainSettings
    run: RunOptions
    plan_svg: str | None
    traces: Sequence[str]
    line_every_s: float | None


def run(args: argparse.Namespace) -> int:
    """Trains on as many ranks as the layout has."""
    training = _training(args)
    ranks = training.job.layout.world_size
    summary = runtime.launch(train_rank, ranks, training, device=args.device)
    if runtime.first_rank():
        _print(args, summary, training.job.dropped)
    if summary.error is not None:
        print(f"megatron-prefix train: {summary.error}", file=sys.stderr)
    return 1 if summary.error is not None or summary.passed is False else 0


def _training(args: argparse.Namespace) -> Training:
    """Finds everything that a user can get wrong, before a rank is started."""
    from megatron_prefix.lab.rl.run_folder import check_unused, has_checkpoints

    schedule = args.prefix_schedule
    if args.plan_svg and schedule == "off":
        raise UserError("--plan-svg: --prefix-schedule off has no plan; give observe, auto or on")
    for option, given in (("--prefix-plan", args.prefix_plan), ("--trace", args.trace)):
        if given and schedule in ("off", "observe"):
            raise UserError(f"{option}: --prefix-schedule {schedule} runs no plan; give auto or on")
    output = args.output or time.strftime("runs/train-%Y%m%d-%H%M%S")
    check_folder_writable(output)
    if args.resume is None or (args.resume == "auto" and not has_checkpoints(Path(output))):
        check_unused(Path(output), overwrite=args.overwrite)
    if args.wandb is not None:
        from megatron_prefix.lab.rl.metrics import check_wandb

        check_wandb()
    check_outputs(args.plan_svg, *args.trace, makes_folders=True)
    job = job_of(args)
    num_groups = len(job.groups)
    per_step = args.groups_per_step or _groups_per_step(num_groups, job.layout.dp, args.minibatches)
    steps = args.steps or math.ceil(num_groups / per_step)
    return Training(
        job,
        settings_of(args, per_step),
        RunOptions(steps, Path(output), args.save_every, args.resume, args.wandb, args.overwrite),
        args.plan_svg,
        args.trace,
        0.0 if args.progress else None if args.json else LINE_EVERY,
    )


def _groups_per_step(num_groups: int, dp: int, num_minibatches: int) -> int:
    """The default: a few groups, one for every rank and minibatch if there are so many."""
    if num_minibatches > num_groups:
        raise UserError(
            f"--minibatches is {num_minibatches}, but the rollouts have {num_groups} groups; "
            "every minibatch needs one"
        )
    wanted = max(GROUPS_PER_STEP, dp * num_minibatches)
    return min(num_groups, wanted) // num_minibatches * num_minibatches


# On a rank ----------------------------------------------------------------------------------------


def train_rank(training: Training) -> Summary:
    """One rank's part; returns the summary."""
    from megatron_prefix.lab.cli.timelines import draw_plan, write_traces
    from megatron_prefix.lab.rl.checkpoint import Identity
    from megatron_prefix.lab.rl.dataset import RolloutSet
    from megatron_prefix.lab.rl.like_for_like import like_for_like
    from megatron_prefix.lab.rl.run import run as run_steps
    from megatron_prefix.lab.rl.trainer import Trainer

    job, settings, options = training.job, training.settings, training.job.options
    with options.joined(job.layout) as world:
        rollouts = RolloutSet(job.groups)
        if settings.compare:
            options, prefix = like_for_like(options, job.spec, settings.prefix)
            settings = replace(settings, prefix=prefix)
        trainer = Trainer(settings, rollouts, options, job.spec, world)
        identity = Identity(
            model=_identity_of(job),
            dtype=job.options.dtype,
            seed=job.options.seed,
            rollouts=rollouts.fingerprint,
            distributed_optimizer=settings.distributed_optimizer,
        )
        shows, total = world.rank == 0, training.run.steps
        with steps_shown(training.line_every_s, total, shows) as show:
            summary = run_steps(
                trainer, training.run, identity, lambda step: show(step.number, _speed(step))
            )
        if training.plan_svg and world.rank == 0:
            draw_plan(trainer, training.plan_svg)
        if training.traces:
            write_traces(trainer, training.traces, world.rank)
        return summary


def _identity_of(job: Job) -> dict[str, Any]:
    """The model, and which Hugging Face weights it began with: the reference keeps them."""
    model = asdict(job.spec)
    if job.options.load_hf is not None:
        from megatron_prefix.lab.models.hf_weights import HFWeights

        model["hf_weights"] = HFWeights(job.options.load_hf, job.spec).fingerprint()
    return model


def _speed(step: CompletedStep) -> str:
    metrics: Any = step.metrics
    return (
        f"loss {metrics['train/loss']:+.4f}, "
        f"{number(round(metrics['train/raw_tokens_per_s']))} tokens/s"
    )


# The end ------------------------------------------------------------------------------------------

FACTS = {
    "steps": "{first_step} to {last_step}",
    "tokens, all rollouts": "{raw_tokens:n}",
    "tokens, executed": "{executed_tokens:n} (-{saved:.1%})",
    "loss, last step": "{loss:+.5f}",
}
SPEED = {"update time per step": "{step_s:.3f} s", "attention": "{attention}"}
COMPARED = {
    "attention of both schedules": "{one_attention}",
    "attention, stock schedule": "{stock_kernel}",
    "attention, prefix schedule": "{prefix_kernel}",
    "update time per step": "",
    "  stock schedule": "{stock_step_s:.3f} s",
    "  prefix schedule": "{step_s:.3f} s",
    "  speedup": "{speedup:.2f}x",
}
VERDICTS = {True: "aligned", False: "NOT aligned", None: "not judged in 16 bit: see align"}
LEFT_OUT = {
    "verdict": "{verdict}",
    "updates skipped": "{skipped}",
    "rollouts dropped by --max-tokens": "{dropped}",
}


def _print(args: argparse.Namespace, summary: Summary, dropped: int) -> None:
    files = {"plan_svg": args.plan_svg, "trace": args.trace}
    if args.json:
        print_json({**vars(summary), **files, "dropped_rollouts": dropped})
        return
    if summary.step_s is None:  # the first step failed: the error says why
        return
    print_facts("GRPO updates", _facts(summary, dropped))
    for failure in summary.failures:
        print(f"  {failure}")
    places = {"metrics": summary.metrics, "checkpoint": summary.checkpoint, "plan": args.plan_svg}
    places["trace"] = ", ".join(args.trace)
    for what, path in places.items():  # not in the table, which would cut them to the width
        if path:
            print(f"{what}: {path}")


def _facts(summary: Summary, dropped: int) -> dict[str, str]:
    compared = summary.stock_step_s is not None
    kernels = summary.stock_attention, summary.prefix_attention
    one = kernels[0] if kernels[0] == kernels[1] else None
    values = {
        **vars(summary),
        "one_attention": one,
        "stock_kernel": None if one else kernels[0],
        "prefix_kernel": None if one else kernels[1],
        "attention": summary.prefix_attention or summary.stock_attention,
        "saved": 1 - summary.executed_tokens / max(1, summary.raw_tokens),
        "skipped": summary.skipped_updates or None,
        "dropped": dropped or None,
        "verdict": VERDICTS[summary.passed] if compared else None,
    }
    rows = facts({**FACTS, **(COMPARED if compared else SPEED)}, values)
    return {**rows, **(differences(summary) if compared else {}), **facts(LEFT_OUT, values)}
