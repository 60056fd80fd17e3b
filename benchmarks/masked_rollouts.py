"""Rollouts as trainers mask them: much of a step then carries no loss.

    python -m benchmarks.masked_rollouts FOLDER OUTPUT

Of every rollout file SET.jsonl.gz of FOLDER, OUTPUT gets the same rollouts by three published
rules: no loss in a group whose rewards are all equal (its advantages are zero), none in a rollout
of the longest tenth of its file (over-long ones are filtered), and a tool's answer of 128 tokens,
which carries none, behind the last message of the others.  Prints what is left.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_prefix.lab.data.rollouts import Group, Rollout, read_groups, write_rollouts

LONGEST, ANSWER = 0.9, 128


def masked(groups: list[Group]) -> Iterator[Group]:
    """The groups by the three rules."""
    limit = np.quantile([len(one) for group in groups for one in group.rollouts], LONGEST)
    for group in groups:
        equal = len({one.reward for one in group.rollouts}) == 1
        yield replace(
            group,
            rollouts=tuple(
                replace(one, loss=()) if equal or len(one) > limit else _answered(one)
                for one in group.rollouts
            ),
        )


def _answered(rollout: Rollout) -> Rollout:
    """With a tool's answer behind it: some tokens of its own."""
    return replace(rollout, tokens=np.concatenate([rollout.tokens, rollout.tokens[-ANSWER:]]))


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the rollout files")
    parser.add_argument("output", type=Path, help="folder of the masked ones")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for path in sorted(args.folder.glob("*.jsonl.gz")):
        groups = list(masked(list(read_groups(path))))
        write_rollouts(args.output / path.name, groups)
        rollouts = [one for group in groups for one in group.rollouts]
        left = sum(bool(one.loss) for one in rollouts)
        print(f"{path.name}: {left} of {len(rollouts)} rollouts carry loss")


if __name__ == "__main__":
    main()
