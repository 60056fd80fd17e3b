"""`megatron-prefix import` (a module cannot be called so): see data/importers.py."""

from __future__ import annotations

import argparse

from megatron_prefix.cli.report import print_facts, print_json, watched
from megatron_prefix.data import importers

HELP = """\
Make a rollout file from what a trainer dumped: verl's rollout dump (input, output, score), messages
in OpenAI's style through a chat template, or token ids."""
EPILOG = """\
examples:
  megatron-prefix import verl 17.jsonl rollouts.jsonl.gz --tokenizer Qwen/Qwen3-8B
  megatron-prefix import messages chats.jsonl rollouts.jsonl.gz --tokenizer ./my-tokenizer
  megatron-prefix import tokens ids.jsonl rollouts.jsonl.gz --vocab-size 151936
"""

add_arguments = importers.add_arguments


def run(args: argparse.Namespace) -> int:
    """Imports the file."""
    made = importers.run(args, lambda groups: watched(args, groups, "groups"))
    print_json(made) if args.json else print_facts(
        "rollout file", {name: str(value) for name, value in made.items()}
    )
    return 0
