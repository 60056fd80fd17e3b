"""`megatron-prefix plan`: what sharing gives on a rollout file, and the plan of the step."""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from megatron_prefix.config import LEAST_SEGMENT, SEGMENT_TOKENS, PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.features.across.exchange_memory import ExchangeMemory
from megatron_prefix.features.chunk_lengths.chooser import ChunkChooser
from megatron_prefix.features.plan_files.table import to_csv
from megatron_prefix.lab.cli import arguments, plan_ranks
from megatron_prefix.lab.cli.inputs import load_groups
from megatron_prefix.lab.cli.outputs import check_outputs, write_text
from megatron_prefix.lab.cli.progress import Advance, progress
from megatron_prefix.lab.cli.report import counted, facts, number, print_facts, print_json
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.presets import ModelSpec, resolve
from megatron_prefix.lab.plans.forest import max_depth
from megatron_prefix.lab.plans.job_plan import rank_cost
from megatron_prefix.lab.plans.timeline import Timeline, simulate
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.lab.predict.peak_memory import PredictedMemory, predict_by_policies
from megatron_prefix.lab.rl.baseline import PACK_TOKENS, pack_sizes
from megatron_prefix.lab.runtime.folders import check_folder_writable
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.lab.view.drawing import timeline_svg
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.actions import POLICIES, Plan, policies
from megatron_prefix.plan.planner import best_plan, loss_ready_after
from megatron_prefix.plan.prediction import Prediction
from megatron_prefix.plan.prediction import predict as predicted_times
from megatron_prefix.plan.step_planner import FEWEST_SEGMENTS, segment_lengths
from megatron_prefix.tree import Forest, TreeOptions, Tries, find_shared

HELP = """\
Shows what sharing saves on rollout files: trees, ratios, compression, predicted speedup, and the
plan of one step with its simulated bubble and memory. All groups make one step unless --groups
limits it. Tokens are positions with a label: a rollout of n tokens has n-1, as nothing predicts
the first. The makespan is how long the step takes, in tokens of forward work (a backward counts
twice, communication not at all), and the bubble is the share of it in which ranks wait. The speedup
is that of the layout, waits and launches included, over the stock schedule on rollouts packed to at
most 16,384 tokens. No memory limit is applied: lengths that are auto are those with the shortest
predicted step, and the peak is printed. Where --vpp makes the predicted step longer, a line says by
how much (time_over_one_chunk in --json).

With --dp N the step is dealt to N ranks. A table shows how many tokens each rank has, how many it
executes if it shares alone, and how many are left if every prompt runs once in the job; the rest of
the output is for the rank that executes most. --across-ranks plans all ranks, and simulates them
together if there is no --pp and no --ep, with messages at 50 GB/s. --output FOLDER writes these
plans (rank-0.csv, ...), a picture (plan.svg) and a trace (plan.json).

In --json, data_parallel (null with one rank) has lists by rank: rollouts, raw_tokens,
executed_tokens, own_tokens (those on no other rank) and executed_tokens_across_ranks; speedup and
speedup_across_ranks of the slowest rank, by tokens; deal and planned_rank; and across_ranks (null
without --across-ranks): by rank executed_tokens, received_tokens, sent_tokens (once for every rank
that gets them), the speedup of the slowest, and if it is simulated peak_received_tokens, busy,
waiting and the makespan, in tokens of forward work."""
EPILOG = """\
examples:
  megatron-prefix plan rollouts.jsonl.gz
  megatron-prefix plan rollouts.jsonl.gz --groups 4 --pp 4 --chunk-tokens auto --svg plan.svg
  megatron-prefix plan a.jsonl.gz b.jsonl.gz --align 1 --min-gain 0 --json
  megatron-prefix plan rollouts.jsonl.gz --groups 1 --model qwen3-8b --csv plan.csv
  megatron-prefix plan rollouts.jsonl.gz --dp 8 --deal length
  megatron-prefix plan rollouts.jsonl.gz --dp 2 --deal length --across-ranks on --output plans
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    arguments.add_rollouts(parser, positional=True)
    arguments.add_lengths(parser, TEXTS)
    text = (
        "which rollouts may share. group: only those of one group; batch: all of the step, as"
        " steps that run do (default {})"
    )
    arguments.add_choice(parser, "--share", text, ("group", "batch"), "batch")
    arguments.add_layout(parser)
    group = parser.add_argument_group("data-parallel ranks")
    arguments.add_deal(group)
    arguments.add_number(group, "--seed", "of --deal random (default {})", 1234, arguments.seed)
    arguments.add_config(group, "across_ranks", texts=TEXTS)
    text = "with --across-ranks on, write the plans of all ranks, a picture and a trace there"
    arguments.add_text(group, "--output", text, metavar="FOLDER")
    parser.add_argument(
        "--model",
        default="llama3-8b",
        metavar="NAME|config.json",
        help="model of the predicted speedup: a preset, or a Hugging Face config.json"
        " (default llama3-8b)",
    )
    arguments.add_config(parser, "cache_host_layers")
    arguments.add_text(parser, "--csv", "write the plan; - is stdout")
    arguments.add_text(parser, "--svg", "draw the simulated timeline")


TEXTS = {
    "segment_tokens": "most positions in one forward (a single span may exceed it); 0: no limit;"
    " auto: the length with the shortest predicted step. In a pipeline N/2, N/4,"
    " N/8 and N/16 are tried, too, as in a run; with --chunk-tokens auto N, N/2, N/4, ..."
    " (default {})",
    "across_ranks": "plan all ranks together: a prefix that several data-parallel ranks share runs"
    " on one of them. auto and on do the same here (default: off)",
}
"""Help of options that mean less than in a run: `plan` has no memory and no schedule's mode."""
MUCH_BUBBLE = 0.25
"""Share of the ranks' time from which a hint says what to do."""


class _PlannedStep(NamedTuple):
    """The rollouts, options, plan and timeline of the step, of one data-parallel rank.

    Attributes:
        prediction: of both schedules in the layout, waits included; stock on packs, as trainers
            make them.
    """

    groups: list[Group]
    dropped: int
    config: PrefixConfig
    options: TreeOptions
    forest: Forest
    plan: Plan
    timeline: Timeline
    model: ModelSpec
    layout: Layout
    prediction: Prediction
    dealt: plan_ranks.Dealt | None = None


def run(args: argparse.Namespace) -> int:
    """Plans, simulates, prints and writes. Python's collector is off, as it would go through all
    rollouts again and again: nearly half of the time of a large file."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return _run(args)
    finally:
        if collects:
            gc.enable()


def _run(args: argparse.Namespace) -> int:
    layout = arguments.layout_of(args)
    if args.json and args.csv == "-":
        raise UserError("--csv - and --json both write to stdout; give --csv a file")
    if args.cache_host_layers and layout.cp > 1:
        raise UserError("--cache-host-layers does not work with --cp: leave one of them out")
    check_outputs(args.csv, args.svg)
    if args.output and not plan_ranks.crosses(arguments.config_of(args), layout):
        raise UserError(
            "--output is for plans of ranks that share prompts: give --dp of at least 2 and"
            " --across-ranks on"
        )
    if args.output and not plan_ranks.simulates(layout):
        raise UserError("--output is for a step that can be simulated: leave --pp and --ep out")
    if args.output:
        check_folder_writable(args.output)
    step = _planned(args, layout)
    if args.csv:
        write_text(args.csv, to_csv(step.plan))
    if args.svg:
        write_text(args.svg, timeline_svg(step.timeline, step.plan, _title(args, step)))
    if args.output and step.dealt is not None:
        plan_ranks.write(step.dealt, args.output, _names(args))
    result = _result(args, step)
    if args.json:
        print_json(result)
    else:
        stderr = args.csv == "-"
        print_facts(_title(args, step), _facts(step, result), stderr=stderr)
        for hint in _hints(args, step, result):
            print(hint, file=sys.stderr if stderr else sys.stdout)
        if step.dealt is not None:
            plan_ranks.show(step.dealt, stderr=stderr)
    return 0


def _hints(args: argparse.Namespace, step: _PlannedStep, result: dict[str, Any]) -> Iterator[str]:
    """What to do about stages that wait long, and about model chunks that only cost time."""
    if result["bubble_fraction"] > MUCH_BUBBLE:
        waits = f"stages wait {step.timeline.bubble_fraction:.1%} of the time"
        if args.chunk_tokens != "auto":
            mend = "--chunk-tokens auto finds lengths of chunks and segments that wait less"
        else:
            mend = "give more groups a step, or fewer stages (--pp)"
        yield f"{waits}: {mend}"
    if (result["time_over_one_chunk"] or 0.0) > 1:
        more = result["time_over_one_chunk"] - 1
        yield f"--vpp {step.layout.vpp} is predicted to take {more:.1%} longer than --vpp 1"


def _over_one_chunk(step: _PlannedStep) -> float | None:
    """The predicted time over that of the same segments with one model chunk a rank."""
    if step.layout.vpp == 1:
        return None
    whole = replace(step.layout, vpp=1)
    plan = best_plan(step.forest, whole.pp, run_ahead=step.config.run_ahead)
    single = _predicted(step.forest, step.options, step.model, whole, plan)
    return step.prediction.prefix_seconds / single.prefix_seconds


def _options(args: argparse.Namespace, config: PrefixConfig, layout: Layout) -> TreeOptions:
    return replace(config.tree_options(layout.alignment), share=args.share)


def _planned(args: argparse.Namespace, layout: Layout) -> _PlannedStep:
    """The step; of lengths that are "auto", with those whose predicted time is the shortest."""
    model = resolve(args.model)
    layout.check_layers(model.name, model.num_layers)
    uncut = 0 if args.chunk_tokens == "auto" else args.chunk_tokens
    config = arguments.config_of(args, chunk_tokens=uncut)
    groups, dropped = load_groups(args)
    dealt = None
    if layout.dp > 1:
        options, how = _options(args, config, layout), (args.deal, args.seed)
        with progress(args, "ranks dealt", layout.dp) as advance:
            dealt = plan_ranks.dealt(groups, model, layout, config, options, *how, advance)
        groups = list(dealt.ranks[dealt.tokens.slowest])
    largest = max(int(rollout.tokens.max()) for group in groups for rollout in group.rollouts)
    # The model only gives costs; an open vocabulary takes its size from the rollouts.
    model = model if model.vocab_size else model.with_vocab(largest + 1)
    steps = list[_PlannedStep]()
    lengths = _segment_lengths(args, config, layout.pp)
    with progress(args, "lengths of segments planned", len(lengths)) as advance:
        pairs = pairs_of_groups(groups, model.needs_tails)
        shared = find_shared(*pairs, _options(args, config, layout))
        for length in lengths:
            config = replace(config, segment_tokens=length)
            config, forest = _cut(args, layout, model, pairs, shared, config)
            plan = best_plan(forest, layout.pp, num_chunks=layout.vpp, run_ahead=config.run_ahead)
            timeline = simulate(plan, ready_after=loss_ready_after(forest))
            options = _options(args, config, layout)
            steps.append(_PlannedStep(
                groups, dropped, config, options, forest, plan, timeline, model, layout,
                _predicted(forest, options, model, layout, plan), dealt,
            ))  # fmt: skip
            advance(1)
            if _fills(args, layout.pp, steps):
                break
    return min(steps, key=lambda step: step.prediction.prefix_seconds)


def _segment_lengths(
    args: argparse.Namespace, config: PrefixConfig, num_ranks: int
) -> tuple[int, ...]:
    """Lengths of segments to try: of "auto" all, beside chunks that are "auto" halves, too, in a
    pipeline those of a run."""
    if args.segment_tokens == "auto":
        return (*reversed(SEGMENT_TOKENS), LEAST_SEGMENT)
    if args.chunk_tokens != "auto":
        return segment_lengths(config, num_ranks) if num_ranks > 1 else (args.segment_tokens,)
    halves = (args.segment_tokens >> by for by in range(1, args.segment_tokens.bit_length()))
    return (args.segment_tokens, *(length for length in halves if length >= LEAST_SEGMENT))


def _fills(args: argparse.Namespace, num_ranks: int, steps: Sequence[_PlannedStep]) -> bool:
    """Whether a step's pipeline has enough segments, so that a run tries no shorter ones; see
    `StepPlanner`."""
    if "auto" in (args.segment_tokens, args.chunk_tokens) or num_ranks == 1:
        return False
    return len(steps) >= 2 and len(steps[-1].forest.segments) >= FEWEST_SEGMENTS * num_ranks


def _cut(
    args: argparse.Namespace,
    layout: Layout,
    model: ModelSpec,
    pairs: Any,
    shared: Tries,
    config: PrefixConfig,
) -> tuple[PrefixConfig, Forest]:
    """The configuration with the chosen length of chunks, and the segments."""
    rollouts, numbers = pairs
    chunk_tokens = args.chunk_tokens
    if chunk_tokens == "auto":
        chooser = ChunkChooser(
            layout.pp, num_chunks=layout.vpp, run_ahead=config.run_ahead,
            cost=rank_cost(model, layout).segment,
        )  # fmt: skip
        first = first_groups(numbers)
        chunk_tokens = chooser.choose(
            [rollouts[n] for n in first], [numbers[n] for n in first],
            _options(args, config, layout),
        )  # fmt: skip
    config = replace(config, chunk_tokens=chunk_tokens)
    return config, replace(shared, options=_options(args, config, layout)).forest()


def first_groups(groups: Sequence[int]) -> list[int]:
    """Rollouts of the first groups, for which chunks are chosen: as many as fit, at least one."""
    sizes = Counter(groups)
    ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))
    return [n for n, group in enumerate(groups) if ends[group] <= max(64, sizes[groups[0]])]


FACTS = {
    "rollouts": "{rollouts:n} in {num_groups}",
    "tokens of all rollouts": "{raw_tokens:n}",
    "tokens executed": "{executed_tokens:n}",
    "compression": "{compression:.2f}x",
    "prompt share, p50 / p95": "{prefix_ratio_p50:.1%} / {prefix_ratio_p95:.1%}",
    "segments": "{segments:n}, {inner_segments:n} inner{most}{cut}",
    "spans begin at multiples of": "{align:n}{reasons}",
    "depth of the tree": "{max_depth:n}",
    "predicted speedup, {model}": "{predicted_speedup:.2f}x (FLOPs: {flop_ratio:.2f}x)",
    "stages": "{num_stages:n}",
    "actions": "{num_actions:n}",
    "makespan": "{makespan:n} tokens of forward work",
    "bubble": "{bubble_fraction:.1%}",
    "peak of live tokens": "{peak_live_tokens:n}",
    "memory per stage, bf16, GiB": "{peaks} (without weights, their gradients and the optimizer)",
    "of which {sidecar}": "{sidecar_gib:.1f}",
    "in addition on the host": "{host_gib:.1f}",
    "dropped, no trained token left": "{dropped:n}",
}


def _result(args: argparse.Namespace, step: _PlannedStep) -> dict[str, Any]:
    """What `--json` prints."""
    forest, timeline = step.forest, step.timeline
    rollouts = [rollout for group in step.groups for rollout in group.rollouts]
    ratios = [rollout.prompt_len / len(rollout) for rollout in rollouts]
    with progress(args, "ranks' memory predicted", step.plan.num_ranks) as advance:
        over_one_chunk = _over_one_chunk(step)
        memory = _peaks(step, advance)
    peak_bytes = {name: round(one.peak) for name, one in memory.items()}
    return {
        "rollouts": len(rollouts),
        "groups": len(step.groups),
        "dropped_rollouts": step.dropped,
        "raw_tokens": forest.raw_tokens,
        "executed_tokens": forest.executed_tokens,
        "compression": forest.raw_tokens / forest.executed_tokens,
        "segments": len(forest.segments),
        "inner_segments": sum(segment.inner for segment in forest.segments),
        "max_depth": max_depth(forest),
        "prefix_ratio_p50": float(np.percentile(ratios, 50)),
        "prefix_ratio_p95": float(np.percentile(ratios, 95)),
        "predicted_speedup": step.prediction.speedup,
        "flop_ratio": cost_of(step.model).speedup(forest),
        "align": step.options.boundary,
        "align_reasons": _alignment_reasons(step),
        "chunk_tokens": step.options.chunk_tokens,
        "segment_tokens": step.options.segment_tokens,
        "num_stages": step.plan.num_stages,
        "num_actions": timeline.num_actions,
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "time_over_one_chunk": over_one_chunk,
        "peak_live_tokens": timeline.peak_live_positions,
        "peak_live_bytes": peak_bytes["retain"],
        "peak_bytes": peak_bytes,
        "sidecar_bytes": round(memory["retain"].cache_peak),
        "sidecar_host_bytes": round(memory["retain"].cache_staged),
        "data_parallel": None if step.dealt is None else plan_ranks.result(step.dealt),
    }


def _predicted(
    forest: Forest, options: TreeOptions, model: ModelSpec, layout: Layout, plan: Plan
) -> Prediction:
    """See `_PlannedStep`."""
    lengths = [-(-num // options.multiple) * options.multiple for num in forest.num_positions]
    sizes = pack_sizes(lengths, PACK_TOKENS)
    microbatch_of = [number for number, size in enumerate(sizes) for _ in range(size)]
    return predicted_times(rank_cost(model, layout), forest, microbatch_of, plan)


def _facts(step: _PlannedStep, result: dict[str, Any]) -> dict[str, str]:
    """The same for people."""
    chunk_tokens, reasons = result["chunk_tokens"], "; ".join(result["align_reasons"])
    gib = {name: size / 2**30 for name, size in result["peak_bytes"].items()}
    host_gib = result["sidecar_host_bytes"] / 2**30
    values = {
        **result,
        "num_groups": counted(result["groups"], "group"),
        "most": f", of at most {number(most)}" if (most := result["segment_tokens"]) else "",
        "cut": f", chunks of {number(chunk_tokens)}" if chunk_tokens else "",
        "reasons": f" ({reasons})" if reasons else "",
        "model": step.model.name,
        "peaks": ", ".join(f"{name} {size:.1f}" for name, size in gib.items()),
        "sidecar": "K/V and states" if step.model.recurrent else "K/V",
        "sidecar_gib": result["sidecar_bytes"] / 2**30,
        "host_gib": host_gib if step.config.cache_host_layers else None,
        "dropped": step.dropped or None,
    }
    return facts(FACTS, values)


def _alignment_reasons(step: _PlannedStep) -> list[str]:
    """What sets the alignment, and the reason to choose another."""
    own, layout = step.config.align, step.layout.alignment
    reasons = [f"layout {number(layout)}"] if layout > 1 else []
    reasons += [f"--align {number(own)}"] if own > 1 else []
    for kind in step.model.recurrent:
        if kind.cut and step.options.boundary % kind.cut:
            reasons.append(
                f"with --align {kind.cut}, where {kind.name}'s kernels cut, a shared prompt is"
                " bitwise the unshared one; else recurrent states round differently"
            )
    return reasons


def _title(args: argparse.Namespace, step: _PlannedStep) -> str:
    groups, stages = len(step.groups), step.plan.num_stages
    rank = "" if step.dealt is None else f", data-parallel rank {step.dealt.tokens.slowest}"
    return f"{_names(args)}: {counted(groups, 'group')}, {counted(stages, 'stage')}{rank}"


def _names(args: argparse.Namespace) -> str:
    return ", ".join(path.rpartition("/")[2] for path in args.rollouts)


def _peaks(step: _PlannedStep, advance: Advance) -> dict[str, PredictedMemory]:
    """Per memory policy the predicted memory of the rank with the highest peak, without weights and
    gradients: bf16, transformer-engine's layers, no recomputation by Megatron.

    Args:
        step: with its layout and model.
        advance: takes each rank.
    """
    plan, layout = step.plan, step.layout
    execution = Execution(
        num_stages=plan.num_stages, tp=layout.tp, cp=layout.cp,
        sequence_parallel=layout.sequence_parallel,
    )  # fmt: skip
    footprint = footprint_of(step.model, execution)
    host_layers = step.config.cache_host_layers
    footprint = replace(footprint, host_layers=host_layers, buffers=ExchangeMemory)
    every = [policies(plan.segments, policy) for policy in POLICIES]
    ranks = []
    for of_rank in predict_by_policies(plan, footprint, every):
        ranks.append(of_rank)
        advance(1)
    highest = (max(column, key=lambda memory: memory.peak) for column in zip(*ranks, strict=True))
    return dict(zip(POLICIES, highest, strict=True))
