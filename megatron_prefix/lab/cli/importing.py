"""`megatron-prefix import`, see lab/data/importers.py. (A module cannot be called `import`.)"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from megatron_prefix.lab.cli.arguments import add_number, add_out
from megatron_prefix.lab.cli.outputs import write_and_print
from megatron_prefix.lab.data.importers import FIELDS, KINDS, import_file
from megatron_prefix.lab.data.rollouts import Group

HELP = f"""\
Makes a rollout file from a trainer's dump: verl's rollouts (input, output, score), OpenAI-style
messages, rendered with a chat template, or token ids.

IN has one JSON object per line. Its fields (alternative names after a bar, optional fields in
brackets):
{FIELDS}"""
EPILOG = """\
examples:
  megatron-prefix import verl 17.jsonl rollouts.jsonl.gz --tokenizer Qwen/Qwen3-8B
  megatron-prefix import messages chats.jsonl rollouts.jsonl.gz --tokenizer ./my-tokenizer
  megatron-prefix import tokens ids.jsonl rollouts.jsonl.gz --vocab-size 151936
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "kind", metavar="KIND", choices=KINDS, help="what IN holds: " + ", ".join(KINDS)
    )
    parser.add_argument("source", metavar="IN", help="file to read: JSON lines, plain or gzip")
    add_out(parser)
    parser.add_argument(
        "--tokenizer", help="a tokenizer.json, or a model folder or name for transformers"
    )
    add_number(parser, "--vocab-size", "refuse token ids of N or more")


def run(args: argparse.Namespace) -> int:
    """Imports the file."""
    groups = import_file(args.source, args.kind, args.tokenizer, vocab_size=args.vocab_size)
    counts = {"untrained": 0}
    write_and_print(args, _counted(groups, counts), counts=counts)
    return 0


def _counted(groups: Iterable[Group], counts: dict[str, int]) -> Iterator[Group]:
    """The groups; adds how many of their rollouts have no trained token."""
    for group in groups:
        counts["untrained"] += sum(not rollout.loss for rollout in group.rollouts)
        yield group
