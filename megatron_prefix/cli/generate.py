"""`megatron-prefix generate`: see data/generate.py."""

from __future__ import annotations

import argparse

from megatron_prefix.cli.report import print_facts, print_json, watched
from megatron_prefix.data import generate

HELP = """\
Make a rollout file of a given size and tree shape: synthetic tokens, rewards and trained spans,
the same for the same arguments."""
EPILOG = """\
examples:
  megatron-prefix generate flat.jsonl.gz --groups 8 --prompt-tokens 10240 --response-tokens 2048
  megatron-prefix generate agents.jsonl.gz --tree turns --depth 5 --uneven
  megatron-prefix generate tree.jsonl --tree branch --rollouts 16 --seed 1 --json
"""

add_arguments = generate.add_arguments


def run(args: argparse.Namespace) -> int:
    """Writes the file."""
    made = generate.run(args, lambda groups: watched(args, groups, "groups", total=args.groups))
    print_json(made) if args.json else print_facts(
        "rollout file", {name: str(value) for name, value in made.items()}
    )
    return 0
