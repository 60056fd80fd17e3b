"""`replay`: many GRPO steps by either schedule from the same weights, and how far they drift."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli import report
from megatron_prefix.lab.cli.arguments import (
    add_baseline,
    add_layout,
    add_lengths,
    add_messages,
    add_rollouts,
    baseline_of,
    layout_of,
)
from megatron_prefix.lab.cli.inputs import load_groups
from megatron_prefix.lab.cli.modelling import add_model, model_options
from megatron_prefix.lab.cli.replay_files import ReplayFiles
from megatron_prefix.lab.cli.training import add_training, settings_of

STEPS = 100
HELP = """\
Trains three times from the same weights on the same rollouts, three runs side by side that do
not touch: the stock schedule; the stock schedule in another reduction order (microbatches and their
rollouts backwards, torch's attention instead of the layers'), which is the noise floor; the prefix
schedule. After every step their parameters are compared (in 16 bit the optimizer's fp32
main parameters). Exit code 0 when the prefix schedule's distance from the stock schedule is at most
twice the noise floor, largest, mean and RMS, after every step; else 1, also where nothing was
shared, no parameter moved, or a loss was not finite.
Steps take groups of the files in turn; groups whose rewards are all equal have no gradient and are
left out."""
EPILOG = """\
examples:
  megatron-prefix replay rollouts.jsonl.gz --steps 20 --groups-per-step 1 --max-tokens 256
  megatron-prefix replay rollouts.jsonl.gz --model tiny-qwen3 --pp 2 --tp 2 --plot replay.svg
  megatron-prefix replay rag.jsonl.gz agents.jsonl.gz --model qwen3-0.6b --dtype bfloat16 \\
      --device cuda --max-tokens 4096 --result-json replay.json --progress
"""
MEASURES = ("max", "mean", "rms")
_SHOWN = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_rollouts(parser, positional=True)
    add_training(parser)
    parser.set_defaults(compare=False)
    group = parser.add_argument_group("replay")
    group.add_argument(
        "--prefix-schedule",
        choices=("auto", "on"),
        default="auto",
        help="auto (default): share where it pays; on: always",
    )
    group.add_argument(
        "--result-json",
        metavar="FILE",
        help="write the result as JSON to FILE too, and after every step what there is",
    )
    group.add_argument(
        "--plot",
        metavar="FILE",
        help="draw distances, losses and weighted log-probs by step (png, svg, pdf)",
    )
    group.add_argument(
        "--same-routes",
        action="store_true",
        help="with experts: before every step the stock run's routers choose each token's, and all"
        " runs follow (Megatron's RouterReplay); else a token that is nearly undecided may go to"
        " another expert in one run; the load-balancing loss still counts what routers would"
        " choose, so add --set moe_aux_loss_coeff=0",
    )
    add_baseline(parser)
    add_model(parser, model="tiny-llama", dtype="float32")
    add_layout(parser)
    add_lengths(parser)
    add_messages(parser)


@dataclass(frozen=True)
class Job:
    """What the ranks of a job are started with."""

    settings: Any
    options: Any
    spec: Any
    layout: Any
    groups: tuple[Any, ...]
    steps: int
    facts: dict[str, int]
    args: argparse.Namespace


def run(args: argparse.Namespace) -> int:
    """Replays on as many ranks as the layout has."""
    from megatron_prefix.lab import runtime

    report.check_outputs(args.result_json)
    report.check_plot(args.plot)
    job = _job(args)
    result = runtime.launch(replay_rank, job.layout.world_size, job, device=args.device)
    if os.environ.get("RANK", "0") == "0":  # one of torchrun's ranks speaks
        _deliver(args, job, result)
    return 0 if result.passed else 1


def _job(args: argparse.Namespace) -> Job:
    """Everything a user can get wrong is found here, before a rank is started."""
    from megatron_prefix.lab import runtime
    from megatron_prefix.lab.models import presets
    from megatron_prefix.lab.rl import routes
    from megatron_prefix.lab.rl.job import fit_vocabulary

    options = model_options(args)
    layout = layout_of(args, runtime.env_world_size())
    spec = presets.resolve(options.model, **dict(options.overrides))
    files, facts = _files(args, spec.vocab_size)
    spec, groups = fit_vocabulary(options, list(_in_turn(files)))
    settings = settings_of(args, args.groups_per_step or _per_step(args, len(files), layout.dp))
    if args.same_routes:
        routes.check(spec, options.recompute)
        settings = replace(settings, routes="given")
    return Job(
        replace(settings, baseline=baseline_of(args)),
        options,
        spec,
        layout,
        tuple(groups),
        args.steps or STEPS,
        facts,
        args,
    )


def _files(
    args: argparse.Namespace, vocab_size: int | None
) -> tuple[list[list[Any]], dict[str, int]]:
    """The groups of every file that have a gradient, and what was left out."""
    from megatron_prefix.lab.rl.batches import advantages

    files, dropped, equal = [], 0, 0
    for path in args.rollouts:
        one_file = argparse.Namespace(**{**vars(args), "rollouts": [path]})
        groups, lost = load_groups(one_file, vocab_size)
        kept = [group for group in groups if any(advantages(group))]
        dropped, equal = dropped + lost, equal + len(groups) - len(kept)
        if not kept:
            raise UserError(
                f"{path}: all rollouts of a group have the same reward, in every group, which gives"
                " no gradient; use rollouts with other rewards, or raise --groups"
            )
        files.append(kept)
    return files, {"dropped_rollouts": dropped, "groups_without_gradient": equal}


def _in_turn(files: list[list[Any]]) -> Iterator[Any]:
    """A group of every file in turn; shorter files begin again until the longest ends."""
    for number in range(max(map(len, files))):
        for groups in files:
            yield groups[number % len(groups)]


def _per_step(args: argparse.Namespace, num_files: int, dp: int) -> int:
    """The default: a group of every file, one for every rank and minibatch."""
    least = max(num_files, dp * args.minibatches)
    return -(-least // args.minibatches) * args.minibatches


def replay_rank(job: Job) -> Any:
    """One rank's part; returns the result, which is the same on all."""
    from megatron_prefix.lab import runtime
    from megatron_prefix.lab.verify import replay

    options = job.options
    world = runtime.initialize(
        job.layout, options.device, options.seed, options.message_timeout_minutes
    )
    try:
        runs = replay.trainers(job.settings, job.groups, options, job.spec, world)
        steps = replay.replayed(runs, job.steps)
        if world.rank:
            return replay.judged(steps)
        with ReplayFiles(job.args, job).kept() as files:
            files.keep(replay.judge(replay.Replay()))  # not those of a run before
            return replay.judged(_watched(job, steps), files.keep)
    finally:
        runtime.shutdown()


def _watched(job: Job, steps: Iterator[Any]) -> Iterator[Any]:
    """The steps, with a bar on stderr; where that is no terminal, a line each, on demand."""
    if sys.stderr.isatty():
        yield from report.watched(job.args, steps, "steps", job.steps)
        return
    for step in steps:
        if job.args.progress:
            seconds = ", ".join(f"{name} {value:.2f} s" for name, value in step.seconds.items())
            print(
                f"step {step.number} of {job.steps}: drift {step.drift.rms:.3g}, floor"
                f" {step.floor.rms:.3g} (RMS), {seconds}",
                file=sys.stderr,
                flush=True,
            )
        yield step


# The end ------------------------------------------------------------------------------------------


def _deliver(args: argparse.Namespace, job: Job, result: Any) -> None:
    files = ReplayFiles(args, job)
    files.write(result)
    if args.json:
        report.print_json(files.found(result))
        return
    if result.steps:
        _print(job, result)
    for failure in result.failures:
        print(f"  {failure}")
    if result.failures:
        _print_choices(args, job.spec)


def _print_choices(args: argparse.Namespace, spec: Any) -> None:
    """What routers may have decided otherwise in one run."""
    if spec.num_moe_experts and not args.same_routes:
        print(
            "  Routers chose for themselves: a token that is nearly undecided may have gone to"
            " another expert in one run. Add --same-routes --set moe_aux_loss_coeff=0 to see"
            " rounding alone."
        )
    elif spec.num_moe_experts and spec.moe_aux_loss_coeff:
        print(
            "  Megatron's load-balancing loss counts the experts that routers would choose, also"
            " where they follow routes: add --set moe_aux_loss_coeff=0 to see rounding alone."
        )


def _print(job: Job, result: Any) -> None:
    table = report.new_table(
        "parameters of the prefix run, and of the second stock run, from the stock run's"
    )
    for name in (
        "step", "largest", "floor", "mean", "floor", "RMS", "floor", "RMS ratio", "loss",
        "log-prob x A",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    last = result.steps[-1].number
    for step in result.steps:
        if step.number in _SHOWN or step.number == last:
            pairs = ((getattr(step.drift, m), getattr(step.floor, m)) for m in MEASURES)
            table.add_row(
                str(step.number), *(f"{value:.2e}" for pair in pairs for value in pair),
                f"{step.ratio('rms'):.2f}", f"{step.loss['prefix']:+.4f}",
                f"{step.weighted_logprob['prefix']:+.4f}",
            )  # fmt: skip
    report.print_rich(table)
    report.print_facts("replay", _facts(job, result))


def _facts(job: Job, result: Any) -> dict[str, str]:
    steps, facts = result.steps, job.facts
    raw, executed = (sum(getattr(s, n) for s in steps) for n in ("raw_tokens", "executed_tokens"))
    found = {
        "steps": str(len(steps)),
        "of them shared": str(result.shared_steps),
        "tokens, all rollouts": report.number(raw),
        "tokens, executed": report.number(executed),
    }
    for name, what in (("loss", "loss"), ("weighted_logprob", "log-prob x advantage")):
        for run, label in (("prefix", "prefix"), ("reordered", "other order")):
            apart = max(abs(getattr(s, name)[run] - getattr(s, name)["stock"]) for s in steps)
            found[f"largest difference of a {what}, {label}"] = f"{apart:.2e}"
    for run, label in (("stock", "stock schedule"), ("prefix", "prefix schedule")):
        found[f"a step, {label}"] = f"{statistics.median(s.seconds[run] for s in steps):.3f} s"
    for measure in MEASURES:
        found[f"drift over noise floor, {measure}"] = (
            f"{result.ratio_max[measure]:.2f} most (at most {result.limit:g})"
        )
    for run in steps[0].skipped:
        if skipped := sum(step.skipped[run] for step in steps):
            found[f"updates skipped, {run} run"] = f"{skipped} of {sum(s.updates for s in steps)}"
    if facts["groups_without_gradient"]:
        found["groups left out: equal rewards"] = str(facts["groups_without_gradient"])
    if facts["dropped_rollouts"]:
        found["rollouts dropped by --max-tokens"] = str(facts["dropped_rollouts"])
    found["verdict"] = "within the noise" if result.passed else "NOT within the noise"
    return found
