"""Reads rollout files for the verbs."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

from megatron_prefix.errors import UserError, listed
from megatron_prefix.lab.cli.progress import watched
from megatron_prefix.lab.data.rollouts import Group, read_groups
from megatron_prefix.lab.data.shorten import shorten


def load_groups(args: argparse.Namespace, vocab_size: int | None = None) -> tuple[list[Group], int]:
    """Reads the files of `arguments.add_rollouts`, with progress.

    Args:
        args: needs `rollouts`, `groups`, `max_tokens`, `progress`.
        vocab_size: token ids must be below it, when given.

    Returns:
        The groups, and the number of rollouts that `--max-tokens` dropped, since they have no
        trained token left.

    Raises:
        UserError: a bad file, or nothing left of it.
    """
    dropped = 0

    def kept() -> Iterator[Group]:
        nonlocal dropped
        for group in itertools.islice(
            read_groups(args.rollouts, vocab_size=vocab_size), args.groups
        ):
            shorter, lost = (
                (group, 0) if args.max_tokens is None else shorten(group, args.max_tokens)
            )
            dropped += lost
            if shorter is not None:
                yield shorter

    groups = list(watched(args, kept(), "rollouts read", size=lambda group: len(group.rollouts)))
    if not groups:
        raise UserError(
            f"--max-tokens {args.max_tokens}: too few, no trained token is left in"
            f" {listed(args.rollouts)}; raise it"
        )
    return groups, dropped
