"""`megatron-prefix generate`: see lab/data/generate.py."""

from __future__ import annotations

import argparse

from megatron_prefix.lab.cli.arguments import add_number, add_out, add_switch, seed, whole
from megatron_prefix.lab.cli.outputs import write_and_print
from megatron_prefix.lab.data.generate import TREES, generate

HELP = """\
Makes a synthetic rollout file of a given size and tree shape: random tokens, rewards and trained
spans. The same arguments give the same file."""
EPILOG = """\
examples:
  megatron-prefix generate flat.jsonl.gz --groups 8 --prompt-tokens 10240 --response-tokens 2048
  megatron-prefix generate agents.jsonl.gz --tree turns --depth 5 --uneven
  megatron-prefix generate tree.jsonl --tree branch --rollouts 16 --seed 1 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_out(parser)
    parser.add_argument(
        "--tree",
        choices=TREES,
        default="flat",
        help="how rollouts branch after the prompt (default flat)",
    )
    add_switch(parser, "--uneven", "make responses of different lengths")
    for flag, kind, default, text in (
        ("--groups", whole(), 8, "number of groups"),
        ("--prompt-tokens", whole(), 1024, "tokens in each prompt"),
        ("--response-tokens", whole(), 256, "tokens in each response"),
        ("--rollouts", whole(), 8, "rollouts in each group"),
        ("--depth", whole(), 3, "levels of a branch tree, or turns of an agent"),
        ("--copies", whole(0), 0, "how many rollouts in each group are copies of the first"),
        ("--vocab-size", whole(), 2048, "size of the vocabulary"),
        ("--seed", seed, 0, "random seed"),
    ):
        add_number(parser, flag, text + " (default {})", default, kind)


def run(args: argparse.Namespace) -> int:
    """Writes the file."""
    groups = generate(
        args.groups,
        args.prompt_tokens,
        args.response_tokens,
        args.rollouts,
        tree=args.tree,
        depth=args.depth,
        vocab_size=args.vocab_size,
        seed=args.seed,
        uneven=args.uneven,
        num_copies=args.copies,
    )
    write_and_print(args, groups, total=args.groups)
    return 0
