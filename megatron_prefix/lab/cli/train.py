"""`train`: GRPO actor updates over rollouts that exist already."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli import report
from megatron_prefix.lab.cli.arguments import (
    add_config,
    add_layout,
    add_lengths,
    add_messages,
    add_rollouts,
    layout_of,
)
from megatron_prefix.lab.cli.inputs import load_groups
from megatron_prefix.lab.cli.modelling import add_model, model_options
from megatron_prefix.lab.cli.training import (
    GROUPS_PER_STEP,
    add_files,
    add_schedule,
    add_training,
    settings_of,
)
from megatron_prefix.plan.files import check_folder_writable

if TYPE_CHECKING:
    from megatron_prefix.lab.data.rollouts import Group
    from megatron_prefix.lab.rl.run import Summary
    from megatron_prefix.lab.rl.trainer import CompletedStep
    from megatron_prefix.lab.runtime import Layout

HELP = """\
Trains a model on a rollout file by GRPO: advantages from each group's rewards, old log-probs by a
pass without gradients where the file has none, a clipped loss, AdamW through Megatron's optimizer.
Metrics go to OUTPUT/metrics.jsonl and, where it is installed, TensorBoard. --compare runs
Megatron-Core's stock schedule on every update too, from the same weights, and compares; the exit
code is then 1 when they differ by more than the numerics policy allows."""
EPILOG = """\
examples:
  megatron-prefix train rollouts.jsonl.gz --steps 10 --lr 1e-3 --output runs/tiny
  megatron-prefix train rollouts.jsonl.gz --compare --plan-svg plan.svg
  megatron-prefix train rollouts.jsonl.gz --steps 20 --save-every 5 --output runs/tiny --resume
  torchrun --nproc-per-node 8 -m megatron_prefix train rollouts.jsonl.gz --device cuda \\
      --load-hf Qwen3-8B --dtype bfloat16 --tp 4 --sequence-parallel --recompute full
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_rollouts(parser, positional=True)
    add_training(parser)
    add_schedule(parser)
    add_files(parser)
    add_model(parser, model="tiny-llama", dtype="float32")
    add_layout(parser)
    add_lengths(parser)
    add_config(parser.add_argument_group("plan"), "plan_file")
    add_messages(parser)


@dataclass(frozen=True)
class Job:
    """What the ranks of a job are started with."""

    settings: Any
    options: Any
    spec: Any
    layout: Layout
    groups: tuple[Group, ...]
    run: Any
    plan_svg: str | None
    traces: tuple[str, ...]
    progress: bool


def run(args: argparse.Namespace) -> int:
    """Trains on as many ranks as the layout has."""
    from megatron_prefix.lab import runtime

    job, dropped = _job(args)
    summary = runtime.launch(train_rank, job.layout.world_size, job, device=args.device)
    if os.environ.get("RANK", "0") == "0":  # one of torchrun's ranks speaks
        _print(args, summary, dropped)
    if summary.error is not None:
        print(f"megatron-prefix train: {summary.error}", file=sys.stderr)
    return 1 if summary.error is not None or summary.passed is False else 0


def _job(args: argparse.Namespace) -> tuple[Job, int]:
    """Everything a user can get wrong is found here, before a rank is started."""
    from megatron_prefix.lab import runtime
    from megatron_prefix.lab.models import presets
    from megatron_prefix.lab.rl.job import fit_vocabulary
    from megatron_prefix.lab.rl.metrics import check_wandb

    schedule = args.prefix_schedule
    if args.plan_svg and schedule == "off":
        raise UserError("--plan-svg: --prefix-schedule off has no plan; give observe, auto or on")
    for option, given in (("--prefix-plan", args.prefix_plan), ("--trace", args.trace)):
        if given and schedule in ("off", "observe"):
            raise UserError(f"{option}: --prefix-schedule {schedule} runs no plan; give auto or on")
    output = args.output or time.strftime("runs/train-%Y%m%d-%H%M%S")
    check_folder_writable(output)
    if args.wandb is not None:
        check_wandb()
    report.check_outputs(args.plan_svg, *args.trace, makes_folders=True)
    options = model_options(args)
    layout = layout_of(args, runtime.env_world_size())
    spec = presets.resolve(options.model, **dict(options.overrides))
    groups, dropped = load_groups(args, spec.vocab_size)
    spec, groups = fit_vocabulary(options, groups)
    per_step = args.groups_per_step or _groups_per_step(len(groups), layout.dp, args.minibatches)
    settings = settings_of(args, per_step)
    job = Job(
        settings,
        options,
        spec,
        layout,
        tuple(groups),
        _run_options(args, output, math.ceil(len(groups) / per_step)),
        args.plan_svg,
        tuple(args.trace),
        args.progress,
    )
    return job, dropped


def _groups_per_step(num_groups: int, dp: int, num_minibatches: int) -> int:
    """The default: a few groups, one for every rank and minibatch where there are so many."""
    if num_minibatches > num_groups:
        raise UserError(
            f"--minibatches is {num_minibatches}, but the rollouts have {num_groups} groups; "
            "every minibatch needs one"
        )
    wanted = max(GROUPS_PER_STEP, dp * num_minibatches)
    return min(num_groups, wanted) // num_minibatches * num_minibatches


def _run_options(args: argparse.Namespace, output: str, steps: int) -> Any:
    from megatron_prefix.lab.rl.settings import RunOptions

    return RunOptions(args.steps or steps, Path(output), args.save_every, args.resume, args.wandb)


# On a rank ----------------------------------------------------------------------------------------


def train_rank(job: Job) -> Summary:
    """One rank's part; returns the summary."""
    from megatron_prefix.lab import runtime

    options = job.options
    world = runtime.initialize(
        job.layout, options.device, options.seed, options.message_timeout_minutes
    )
    try:
        from megatron_prefix.lab.cli.timelines import draw_plan, write_traces
        from megatron_prefix.lab.rl.checkpoint import Identity
        from megatron_prefix.lab.rl.dataset import RolloutSet
        from megatron_prefix.lab.rl.run import run as run_steps
        from megatron_prefix.lab.rl.trainer import Trainer

        rollouts = RolloutSet(job.groups)
        trainer = Trainer(job.settings, rollouts, job.options, job.spec, world)
        identity = Identity(
            model=_identity_of(job),
            dtype=job.options.dtype,
            seed=job.options.seed,
            rollouts=rollouts.fingerprint,
            distributed_optimizer=job.settings.distributed_optimizer,
        )
        with _progress(job, world.rank) as show:
            summary = run_steps(trainer, job.run, identity, show)
        if job.plan_svg and world.rank == 0:
            draw_plan(trainer, job.plan_svg)
        if job.traces:
            write_traces(trainer, job.traces, world.rank)
        return summary
    finally:
        runtime.shutdown()


def _identity_of(job: Job) -> dict[str, Any]:
    """The model, and which Hugging Face weights it began with: the reference keeps them."""
    found = asdict(job.spec)
    if job.options.load_hf is not None:
        from megatron_prefix.lab.models.hf_weights import HFWeights

        found["hf_weights"] = HFWeights(job.options.load_hf, job.spec).fingerprint()
    return found


@contextlib.contextmanager
def _progress(job: Job, rank: int) -> Iterator[Callable[[CompletedStep], None]]:
    """A bar on stderr with loss and speed; lines where stderr is no terminal, on demand."""
    if rank or not (sys.stderr.isatty() or job.progress):
        yield lambda step: None
    elif not sys.stderr.isatty():
        yield lambda step: print(
            f"step {step.number} of {job.run.steps}: {_speed(step)}", file=sys.stderr, flush=True
        )
    else:
        from rich import progress as bars
        from rich.console import Console

        columns = (
            bars.SpinnerColumn(),
            bars.TextColumn("steps"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.description}"),
        )
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=job.run.steps)
            yield lambda step: bar.update(task, completed=step.number, description=_speed(step))


def _speed(step: CompletedStep) -> str:
    metrics: Any = step.metrics
    return (
        f"loss {metrics['train/loss']:+.4f}, "
        f"{report.number(round(metrics['train/raw_tokens_per_s']))} tokens/s"
    )


# The end ------------------------------------------------------------------------------------------


def _print(args: argparse.Namespace, summary: Summary, dropped: int) -> None:
    result = {
        **summary.as_json(),
        "plan_svg": args.plan_svg,
        "trace": args.trace,
        "dropped_rollouts": dropped,
    }
    if args.json:
        report.print_json(result)
        return
    if summary.step_s is None:  # the first step failed: the error says why
        return
    report.print_facts("GRPO updates", _facts(summary, dropped))
    for failure in summary.failures:
        print(f"  {failure}")
    places = {"metrics": summary.metrics, "checkpoint": summary.checkpoint, "plan": args.plan_svg}
    places["trace"] = ", ".join(args.trace)
    for what, path in places.items():  # not in the table, which would cut them to the width
        if path:
            print(f"{what}: {path}")


def _facts(summary: Summary, dropped: int) -> dict[str, str]:
    step_s = summary.step_s or math.nan
    saved = 1 - summary.executed_tokens / max(1, summary.raw_tokens)
    facts = {
        "steps": f"{summary.first_step} to {summary.last_step}",
        "tokens, all rollouts": report.number(summary.raw_tokens),
        "tokens, executed": f"{report.number(summary.executed_tokens)} (-{report.percent(saved)})",
        "loss, last step": f"{summary.loss:+.5f}",
        "updates of a step": f"{step_s:.3f} s",
    }
    if summary.stock_step_s is not None:
        facts["updates of a step"] = ""
        facts["  stock schedule"] = f"{summary.stock_step_s:.3f} s"
        facts["  prefix schedule"] = f"{step_s:.3f} s"
        facts["  speedup"] = f"{summary.speedup:.2f}x"
        facts |= report.differences(summary)
        facts["verdict"] = {
            True: "aligned",
            False: "NOT aligned",
            None: "not judged in 16 bit: see align",
        }[summary.passed]
    if summary.skipped_updates:
        facts["updates skipped"] = str(summary.skipped_updates)
    if dropped:
        facts["rollouts dropped by --max-tokens"] = str(dropped)
    return facts
