"""`replay`: many GRPO steps by either schedule from the same weights, and how far they drift."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli import arguments
from megatron_prefix.lab.cli.inputs import load_groups
from megatron_prefix.lab.cli.modelling import Job, add_model, model_options
from megatron_prefix.lab.cli.outputs import check_outputs, check_plot
from megatron_prefix.lab.cli.progress import steps_shown
from megatron_prefix.lab.cli.replay_files import ReplayFiles
from megatron_prefix.lab.cli.report import facts, print_facts, print_json, print_records
from megatron_prefix.lab.cli.training import add_training, settings_of
from megatron_prefix.lab.rl.settings import TrainSettings

STEPS = 100
HELP = """\
Trains three times from the same weights on the same rollouts, side by side: with the stock
schedule, with the stock schedule in another reduction order (microbatches and their rollouts
backwards, torch's attention instead of the layers'), and with the prefix schedule. After every step
their parameters are compared (in 16 bit the optimizer's fp32 main parameters). How far the two
stock runs are apart is the noise floor. Exit code 0 if the prefix run is at most twice as far from
the stock run, by the largest, the mean and the RMS difference, after every step; else 1, also if
nothing was shared, no parameter moved, or a loss was not finite.
Steps take groups of the files in turn; groups whose rewards are all equal have no gradient and are
left out. --progress writes a line a step to stderr."""
EPILOG = """\
examples:
  megatron-prefix replay rollouts.jsonl.gz --steps 20 --groups-per-step 1 --max-tokens 256
  megatron-prefix replay rollouts.jsonl.gz --model tiny-qwen3 --pp 2 --tp 2 --plot replay.svg
  megatron-prefix replay rag.jsonl.gz agents.jsonl.gz --model qwen3-0.6b --dtype bfloat16 \\
      --device cuda --max-tokens 4096 --result-json replay.json --progress
"""
_SHOWN = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    several = "steps take groups of several in turn"
    arguments.add_rollouts(parser, positional=True, several=several)
    add_training(parser)
    parser.set_defaults(compare=False)
    group = parser.add_argument_group("replay")
    text = "mode. auto (default): share where it pays; on: share every step"
    arguments.add_choice(group, "--prefix-schedule", text, ("auto", "on"), "auto")
    text = "write the result as JSON to FILE too, renewed after every step"
    arguments.add_text(group, "--result-json", text)
    text = "draw distances, losses and weighted log-probs by step (png, svg, pdf)"
    arguments.add_text(group, "--plot", text)
    arguments.add_switch(
        group,
        "--same-routes",
        "with experts: all runs send tokens to the experts that the stock run's routers choose"
        " (Megatron's RouterReplay). Otherwise rounding may send a token to another expert in one"
        " run. The load-balancing loss still counts what each run's routers would choose: turn it"
        " off with --set moe_aux_loss_coeff=0",
    )
    arguments.add_baseline(parser)
    add_model(parser, model="tiny-llama", dtype="float32")
    arguments.add_layout(parser)
    arguments.add_lengths(parser)
    arguments.add_messages(parser)


@dataclass(frozen=True)
class Replayed:
    """What the ranks of a job replay.

    Attributes:
        job: model, layout and rollouts.
        settings: of the prefix run.
        steps: how many.
        left_out: what was left out of the files: keys of the JSON.
        args: the parsed arguments.
    """

    job: Job
    settings: TrainSettings
    steps: int
    left_out: dict[str, int]
    args: argparse.Namespace


def run(args: argparse.Namespace) -> int:
    """Replays on as many ranks as the layout has."""
    check_outputs(args.result_json)
    check_plot(args.plot)
    replayed = _replayed(args)
    ranks = replayed.job.layout.world_size
    result = runtime.launch(replay_rank, ranks, replayed, device=args.device)
    if runtime.first_rank():
        _deliver(replayed, result)
    return 0 if result.passed else 1


def _replayed(args: argparse.Namespace) -> Replayed:
    """Finds everything that a user can get wrong, before a rank is started."""
    options = model_options(args)
    from megatron_prefix.lab.rl import routes
    from megatron_prefix.lab.rl.job import fit_vocabulary

    layout = arguments.layout_of(args, runtime.env_world_size())
    files, left_out = _files(args, options.spec().vocab_size)
    spec, groups = fit_vocabulary(options, list(_in_turn(files)))
    settings = settings_of(args, args.groups_per_step or _per_step(args, len(files), layout.dp))
    if args.same_routes:
        routes.check(spec, options.recompute)
        settings = replace(settings, routes="given")
    settings = replace(settings, baseline=arguments.baseline_of(args))
    job = Job(options, spec, layout, tuple(groups))
    return Replayed(job, settings, args.steps or STEPS, left_out, args)


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


def replay_rank(replayed: Replayed) -> Any:
    """One rank's part; returns the result, which is the same on all."""
    from megatron_prefix.lab.verify import replay

    job = replayed.job
    with job.options.joined(job.layout) as world:
        runs = replay.trainers(replayed.settings, job.groups, job.options, job.spec, world)
        steps = replay.replayed(runs, replayed.steps)
        if world.rank:
            return replay.judged(steps)
        with ReplayFiles(replayed).kept() as files:
            files.keep(replay.judge(replay.Replay()))  # not those of a run before
            return replay.judged(_watched(replayed, steps), files.keep)


def _watched(replayed: Replayed, steps: Iterator[Any]) -> Iterator[Any]:
    """The steps, with their progress on stderr."""
    with steps_shown(0.0 if replayed.args.progress else None, replayed.steps) as show:
        for step in steps:
            seconds = ", ".join(f"{name} {value:.2f} s" for name, value in step.seconds.items())
            drift, floor = step.drift.rms, step.floor.rms
            show(step.number, f"drift {drift:.3g}, floor {floor:.3g} (RMS), {seconds}")
            yield step


# The end ------------------------------------------------------------------------------------------

COLUMNS = (
    ("step", "{number}"),
    ("largest", "{drift.max:.2e}"),
    ("floor", "{floor.max:.2e}"),
    ("mean", "{drift.mean:.2e}"),
    ("floor", "{floor.mean:.2e}"),
    ("RMS", "{drift.rms:.2e}"),
    ("floor", "{floor.rms:.2e}"),
    ("RMS ratio", "{ratio:.2f}"),
    ("loss", "{loss[prefix]:+.4f}"),
    ("log-prob x A", "{weighted_logprob[prefix]:+.4f}"),
)
FACTS = {
    "steps": "{num_steps}",
    "of them shared": "{shared_steps}",
    "tokens, all rollouts": "{raw_tokens:n}",
    "tokens, executed": "{executed_tokens:n}",
    "largest difference of a loss, prefix": "{loss[prefix]:.2e}",
    "largest difference of a loss, other order": "{loss[reordered]:.2e}",
    "largest difference of a log-prob x advantage, prefix": "{weighted_logprob[prefix]:.2e}",
    "largest difference of a log-prob x advantage, other order": (
        "{weighted_logprob[reordered]:.2e}"
    ),
    "time per step, stock schedule": "{seconds[stock]:.3f} s",
    "time per step, prefix schedule": "{seconds[prefix]:.3f} s",
    "drift over noise floor, max": "{ratio_max[max]:.2f} most (at most {limit:g})",
    "drift over noise floor, mean": "{ratio_max[mean]:.2f} most (at most {limit:g})",
    "drift over noise floor, rms": "{ratio_max[rms]:.2f} most (at most {limit:g})",
    "updates skipped, stock run": "{skipped[stock]} of {updates}",
    "updates skipped, reordered run": "{skipped[reordered]} of {updates}",
    "updates skipped, prefix run": "{skipped[prefix]} of {updates}",
    "groups left out: equal rewards": "{groups_without_gradient}",
    "rollouts dropped by --max-tokens": "{dropped_rollouts}",
    "verdict": "{verdict}",
}
OWN_ROUTES = (
    "  Routers chose for themselves: a token that is nearly undecided may have gone to another"
    " expert in one run. Add --same-routes --set moe_aux_loss_coeff=0 to see rounding alone."
)
BALANCED = (
    "  Megatron's load-balancing loss counts the experts that routers would choose, even if they"
    " follow routes: add --set moe_aux_loss_coeff=0 to see rounding alone."
)


def _deliver(replayed: Replayed, result: Any) -> None:
    files = ReplayFiles(replayed)
    files.write(result)
    if replayed.args.json:
        print_json(files.result_of(result))
        return
    if result.steps:
        _print(replayed, result)
    for failure in result.failures:
        print(f"  {failure}")
    spec = replayed.job.spec
    if result.failures and spec.num_moe_experts:  # what may have been decided otherwise in one run
        if not replayed.args.same_routes:
            print(OWN_ROUTES)
        elif spec.moe_aux_loss_coeff:
            print(BALANCED)


def _print(replayed: Replayed, result: Any) -> None:
    last = result.steps[-1].number
    print_records(
        "parameters of the prefix run, and of the second stock run, from the stock run's",
        COLUMNS,
        (
            {**vars(step), "ratio": step.ratio("rms")}
            for step in result.steps
            if step.number in _SHOWN or step.number == last
        ),
    )
    print_facts("replay", facts(FACTS, _values(replayed, result)))


def _values(replayed: Replayed, result: Any) -> dict[str, Any]:
    """Of FACTS: sums, medians and largest differences over the steps; None for zeros that are not
    worth a line."""
    steps, runs = result.steps, result.steps[0].seconds

    def apart(curve: str) -> dict[str, float]:
        values = [getattr(step, curve) for step in steps]
        return {run: max(abs(value[run] - value["stock"]) for value in values) for run in runs}

    return {
        **vars(result),
        **{name: value or None for name, value in replayed.left_out.items()},
        "num_steps": len(steps),
        "raw_tokens": sum(step.raw_tokens for step in steps),
        "executed_tokens": sum(step.executed_tokens for step in steps),
        "loss": apart("loss"),
        "weighted_logprob": apart("weighted_logprob"),
        "seconds": {run: statistics.median(step.seconds[run] for step in steps) for run in runs},
        "skipped": {run: sum(step.skipped[run] for step in steps) or None for run in runs},
        "updates": sum(step.updates for step in steps),
        "verdict": "within the noise" if result.passed else "NOT within the noise",
    }
