"""`align`: do the two schedules agree, step against step?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli import arguments
from megatron_prefix.lab.cli.modelling import Job, add_model, job_of
from megatron_prefix.lab.cli.progress import Advance, draws_aligned
from megatron_prefix.lab.cli.report import differences, facts, number, print_facts, print_json

HELP = """\
Runs Megatron-Core's stock schedule and the prefix schedule from the same weights on the same
microbatches, with one AdamW step each, and compares every loss, log-prob, gradient and parameter.
Microbatches are packed rollouts, or with --baseline rollout one rollout each. Exit code 0 if all
are within the numerics policy, else 1.
Megatron's local attention does not support --cp. There the stock schedule attends to gathered keys
instead, and the output says so.
Advantages are drawn by --seed: with equal rewards in a group all would be zero."""
EPILOG = """\
examples:
  megatron-prefix align --rollouts rollouts.jsonl.gz --groups 2 --max-tokens 512
  megatron-prefix align --rollouts rollouts.jsonl.gz --model tiny-qwen3 --dtype float32 --json
  megatron-prefix align --rollouts rollouts.jsonl.gz --baseline packed --pack-tokens 4096
  megatron-prefix align --rollouts rollouts.jsonl.gz --dp 2 --deal length
  megatron-prefix align --rollouts rollouts.jsonl.gz --model llama3-8b --set num_layers=4 \\
      --dtype bfloat16 --device cuda
  megatron-prefix align --rollouts rollouts.jsonl.gz --load-hf Qwen3-0.6B --dtype float32
"""


FACTS = {
    "compared with": "{compared_with}",
    "microbatches": "{microbatches:n}, {packing}",
    "tokens, all rollouts": "{raw_tokens:n}",
    "tokens, executed": "{executed_tokens:n}",
    "tokens, received from other ranks": "{received:n}",
}
MORE_FACTS = {
    "gradient error against fp32, over stock's": "{grad_error_ratio_p50:.3f} median,"
    " {grad_error_ratio_max:.3f} most, over {draws} draws (at most {tolerance:.2f}, chance aside)",
    "rollouts dropped by --max-tokens": "{dropped}",
    "verdict": "{verdict}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    arguments.add_rollouts(parser)
    add_model(parser, model="tiny-llama", dtype="float64")
    arguments.add_layout(parser)
    arguments.add_lengths(parser)
    arguments.add_config(parser.add_argument_group("plan"), "plan_file")
    arguments.add_baseline(parser)
    arguments.add_messages(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the comparison on as many ranks as the layout has."""
    if args.dtype == "float64" and args.device == "cuda":
        raise UserError(
            "--dtype float64 --device cuda: Megatron's optimizer takes no float64 gradients on a"
            " GPU; give --device cpu, or float32"
        )
    config, baseline = arguments.config_of(args), arguments.baseline_of(args)
    job = job_of(args)
    ranks = job.layout.world_size
    result = runtime.launch(align_rank, ranks, job, config, baseline, args, device=args.device)
    if runtime.first_rank():
        _print(args, result, job.dropped)
    return 0 if result.passed else 1


def align_rank(job: Job, config: Any, baseline: Any, args: argparse.Namespace | None = None) -> Any:
    """One rank's part; returns the verdict over all ranks. With `args` the first rank shows the
    progress."""
    from megatron_prefix.lab.models.config import alignment
    from megatron_prefix.lab.verify import align

    options, spec, layout, groups = job.options, job.spec, job.layout, job.groups
    with options.joined(layout):
        with draws_aligned(args, options.dtype) as advance:
            advance(0, "building the model")
            chunks = options.build(spec, layout)
            exact = None
            if options.dtype == "bfloat16":
                exact = _said(options.reference(spec, layout, chunks), advance)
            mine, least = align.of_this_rank(spec, layout, groups, config, baseline, options.seed)
            verdict = align.align(
                chunks, mine, config, seed=options.seed, multiple=alignment(spec, layout),
                reference=exact, baseline=baseline, least=least, advance=advance,
                num_tokens=sum(len(rollout) - 1 for group in groups for rollout in group.rollouts),
            )  # fmt: skip
        return align.over_ranks(verdict)


def _said(build: Callable[[], Any], advance: Advance) -> Callable[[], Any]:
    """`build`, of the reference, which says what it does."""

    def built() -> Any:
        advance(0, "building the fp32 reference")
        return build()

    return built


def _print(args: argparse.Namespace, result: Any, dropped: int) -> None:
    if args.json:
        print_json({**vars(result), "deal": args.deal, "dropped_rollouts": dropped})
        return
    packs = f"packed to {number(result.pack_tokens)} tokens"
    values = {
        **vars(result),
        "packing": packs if result.pack_tokens else "one rollout each",
        "received": result.received_tokens or None,
        "dropped": dropped or None,
        "verdict": "aligned" if result.passed else "NOT aligned",
    }
    rows = {**facts(FACTS, values), **differences(result), **facts(MORE_FACTS, values)}
    print_facts("stock schedule against prefix schedule", rows)
    for failure in result.failures:
        print(f"  {failure}")
