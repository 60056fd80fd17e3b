"""Rewrites a rollout file: one sequence per call of the model, as agent trainers export them.

A call's sequence is its rollout up to the end of the call, and only the call is trained, so the
sequences of a rollout are prefixes of one another.

    python -m benchmarks.calls ROLLOUTS.jsonl.gz CALLS.jsonl.gz
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group, Rollout, read_groups, write_rollouts


def calls(rollout: Rollout) -> Iterator[Rollout]:
    """One rollout for each trained span; advantages and log-probs of the file are left out."""
    for number, (start, end) in enumerate(rollout.loss):
        uid, tokens = f"{rollout.uid}/{number}", rollout.tokens[:end]
        yield Rollout(rollout.group, uid, tokens, start, ((start, end),), rollout.reward)


def main(arguments: Sequence[str]) -> int:
    """Rewrites the file; groups without a trained token are left out."""
    if len(arguments) != 2:
        print("give two files: python -m benchmarks.calls ROLLOUTS CALLS", file=sys.stderr)
        return 2
    source, target = arguments
    groups = (
        Group(group.name, tuple(call for rollout in group.rollouts for call in calls(rollout)))
        for group in read_groups(source)
    )
    try:
        made = write_rollouts(target, (group for group in groups if group.rollouts))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(*(f"{name} {count:,}" for name, count in made.items()), sep=", ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
