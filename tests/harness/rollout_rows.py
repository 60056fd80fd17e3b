"""Valid rows of rollout files, which tests change, and rollouts as plain values."""

import dataclasses
import json

import numpy as np

VOCAB = 32


def row(**changes):
    good = {
        "group": "a", "uid": 0, "tokens": [1, 2, 3, 4, 5, 6], "prompt_len": 2,
        "loss": [[2, 4], [5, 6]], "reward": 1.0,
    }  # fmt: skip
    return {name: value for name, value in (good | changes).items() if value is not Ellipsis}


def second(**changes):
    """A file whose second row is `row(uid=1)` with `changes`; `...` takes a field away."""
    return b"\n".join(json.dumps(r).encode() for r in (row(), row(**({"uid": 1} | changes))))


def rows(*names):
    return b"\n".join(json.dumps(row(group=group, uid=uid)).encode() for group, uid in names)


def fields(rollout):
    """The rollout as plain values, exact and comparable."""
    values = dataclasses.asdict(rollout)
    assert values["tokens"].dtype == np.int32
    for name in ("tokens", "old_logprobs"):
        if values[name] is not None:
            values[name] = [repr(value) for value in values[name].tolist()]
    return values


def all_fields(groups):
    return [(group.name, [fields(rollout) for rollout in group.rollouts]) for group in groups]
