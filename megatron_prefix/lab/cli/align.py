"""`align`: do the two schedules agree, step against step?"""

from __future__ import annotations

import argparse
import os
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli import report
from megatron_prefix.lab.cli.arguments import (
    add_baseline,
    add_config,
    add_layout,
    add_lengths,
    add_messages,
    add_rollouts,
    baseline_of,
    config_of,
    layout_of,
)
from megatron_prefix.lab.cli.inputs import load_groups
from megatron_prefix.lab.cli.modelling import add_model, model_options

HELP = """\
Runs Megatron-Core's stock schedule on full sequences and the prefix schedule, from the same
weights on the same microbatches, with one AdamW step each, and compares every loss, log-prob,
gradient and parameter. Microbatches are packed rollouts, or with --baseline rollout one rollout
each. Exit code 0 when all are within the numerics policy, else 1.
With --cp, which the stock schedule's local attention refuses, it attends to gathered keys instead,
and the output says so.
Advantages are drawn by --seed, so that equal rewards do not make a comparison of zeros."""
EPILOG = """\
examples:
  megatron-prefix align --rollouts rollouts.jsonl.gz --groups 2 --max-tokens 512
  megatron-prefix align --rollouts rollouts.jsonl.gz --model tiny-qwen3 --dtype float32 --json
  megatron-prefix align --rollouts rollouts.jsonl.gz --baseline packed --pack-tokens 4096
  megatron-prefix align --rollouts rollouts.jsonl.gz --model llama3-8b --set num_layers=4 \\
      --dtype bfloat16 --device cuda
  megatron-prefix align --rollouts rollouts.jsonl.gz --load-hf Qwen3-0.6B --dtype float32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_rollouts(parser)
    add_model(parser, model="tiny-llama", dtype="float64")
    add_layout(parser)
    add_lengths(parser)
    add_config(parser.add_argument_group("plan"), "plan_file")
    add_baseline(parser)
    add_messages(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the comparison on as many ranks as the layout has."""
    from megatron_prefix.lab import runtime
    from megatron_prefix.lab.models import presets
    from megatron_prefix.lab.rl.job import fit_vocabulary

    options = model_options(args)
    layout = layout_of(args, runtime.env_world_size())
    if args.dtype == "float64" and args.device == "cuda":
        raise UserError(
            "--dtype float64 --device cuda: Megatron's optimizer takes no float64 gradients on a"
            " GPU; give --device cpu, or float32"
        )
    config, baseline = config_of(args), baseline_of(args)
    spec = presets.resolve(options.model, **dict(options.overrides))
    groups, dropped = load_groups(args, spec.vocab_size)
    spec, groups = fit_vocabulary(options, groups)
    job = (options, spec, layout, groups, config, baseline, args)
    result = runtime.launch(align_rank, layout.world_size, *job, device=args.device)
    if os.environ.get("RANK", "0") == "0":  # one of torchrun's ranks speaks
        _print(args, result, dropped)
    return 0 if result.passed else 1


def align_rank(
    options: Any,
    spec: Any,
    layout: Any,
    groups: list,
    config: Any,
    baseline: Any,
    args: argparse.Namespace | None = None,
) -> Any:
    """One rank's part; returns the verdict over all ranks. With `args` the first rank shows the
    progress."""
    from megatron_prefix.lab import runtime
    from megatron_prefix.lab.verify import align

    runtime.initialize(layout, options.device, options.seed, options.message_timeout_minutes)
    try:
        chunks = options.build(spec, layout)
        exact = options.reference(spec, layout, chunks) if options.dtype == "bfloat16" else None
        mine, least = align.of_this_rank(spec, layout, groups, config, baseline)
        with report.draws_aligned(args, options.dtype) as advance:
            verdict = align.align(
                chunks, mine, config, seed=options.seed, multiple=layout.alignment,
                reference=exact, baseline=baseline, least=least, advance=advance,
                num_tokens=sum(len(rollout) - 1 for group in groups for rollout in group.rollouts),
            )  # fmt: skip
        return align.over_ranks(verdict)
    finally:
        runtime.shutdown()


def _print(args: argparse.Namespace, result: Any, dropped: int) -> None:
    if args.json:
        report.print_json({**result.as_json(), "dropped_rollouts": dropped})
        return
    facts = {
        "compared with": result.compared_with,
        "microbatches": _microbatches(result),
        "tokens, all rollouts": report.number(result.raw_tokens),
        "tokens, executed": report.number(result.executed_tokens),
        **report.differences(result),
    }
    if result.grad_error_ratio_max is not None:
        facts["gradient error against fp32, of stock's"] = (
            f"{result.grad_error_ratio_p50:.3f} median, {result.grad_error_ratio_max:.3f} most,"
            f" over {result.draws} draws (at most {result.tolerance:.2f}, chance aside)"
        )
    if dropped:
        facts["rollouts dropped by --max-tokens"] = str(dropped)
    facts["verdict"] = "aligned" if result.passed else "NOT aligned"
    report.print_facts("stock schedule against prefix schedule", facts)
    for failure in result.failures:
        print(f"  {failure}")


def _microbatches(result: Any) -> str:
    number = report.number(result.microbatches)
    if not result.pack_tokens:
        return f"{number}, one rollout each"
    return f"{number}, packed to {report.number(result.pack_tokens)} tokens"
