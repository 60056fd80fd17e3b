"""`megatron-prefix generate`: see lab/data/generate.py."""

from __future__ import annotations

import argparse

from megatron_prefix.lab.cli.arguments import add_number, add_out, add_switch, seed, whole
from megatron_prefix.lab.cli.outputs import write_and_print
from megatron_prefix.lab.data.generate import TREES, generate

HELP = """\
Make a rollout file of a given size and tree shape: synthetic tokens, rewards and trained spans,
the same for the same arguments."""
EPILOG = """\
examples:
  megatron-prefix generate flat.jsonl.gz --groups 8 --prompt-tokens 10240 --response-tokens 2048
  megatron-prefix generate agents.jsonl.gz --tree turns --depth 5 --uneven
  megatron-prefix generate tree.jsonl --tree branch --rollouts 16 --seed 1 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_out(parser)
    parser.add_argument("--tree", choices=TREES, default="flat", help="shape under the prompt")
    add_switch(parser, "--uneven", "responses of different length")
    for flag, kind, default, text in (
        ("--groups", whole(), 8, "number of groups"),
        ("--prompt-tokens", whole(), 1024, "tokens of each prompt"),
        ("--response-tokens", whole(), 256, "tokens after the prompt"),
        ("--rollouts", whole(), 8, "rollouts of a group"),
        ("--depth", whole(), 3, "levels of a branch tree, turns of an agent"),
        ("--copies", whole(0), 0, "rollouts of a group that copy its first"),
        ("--vocab-size", whole(), 2048, "token ids are below it"),
        ("--seed", seed, 0, "equal seeds give equal files"),
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
